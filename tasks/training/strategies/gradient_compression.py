"""How the flat gradients of a rank are summed over the ranks: exactly, in fp16, or with PowerSGD.

Works on any communicator. Gradients are summed, never averaged, so what a lossy way has left out on
one rank can be paid back by any other.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tasks.training.strategies.base import Communicator, State
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.optimizer import FlatGradients, ring_bytes

LOGGER = logging.getLogger(__name__)
# Half of float16's largest number: scaling to it by a power of two never overflows.
HALF_PRECISION_TOP = 32768.0
# Of PowerSGD's approximation of a weight matrix: a fortieth of the bytes on the flights' network.
POWERSGD_RANK = 4
# Where the first power iteration starts: anywhere, but on all ranks at the same place.
START_SEED = 20190531
# Where a checkpoint keeps what the ranks have left out, and the factors of the next iteration.
RESIDUAL = "gradient_residual"
FACTORS = "powersgd_right"


class GradientSum:
    """Replaces a rank's gradients by their sum over all ranks: the fp32 sum, in one collective."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks

    def sum_(self, gradients: FlatGradients) -> int:
        """Sum over the ranks in place; collective. Returns the bytes that this rank sent."""
        self._ranks.sum_(gradients.flat)
        return ring_bytes(gradients.flat.nbytes, self._ranks.size)

    def state(self) -> State:
        """What a checkpoint keeps, such as what was left out so far; collective."""
        return {}

    def load(self, state: State) -> None:
        """Take over what `state` gave, on any world size."""
        if RESIDUAL in state:
            LOGGER.warning(
                "the checkpoint holds gradients that a lossy compression had left out; they are "
                "dropped, since this strategy pays nothing back"
            )


def gradient_sum(config: StrategyConfig, ranks: Communicator) -> GradientSum:
    """The sum that a configuration asks for."""
    kinds = {"none": GradientSum, "fp16": HalfPrecisionSum, "powersgd": PowerSgdSum}
    return kinds[config.gradient_compression](ranks)


class HalfPrecisionSum(GradientSum):
    """The sum in float16, at half the bytes; each value keeps 11 significant bits.

    All ranks scale by one power of two, chosen so that no partial sum can overflow: no sum is
    larger than the sum of the ranks' largest values. What is 2**-39 of that, or less, vanishes.
    torch's and Horovod's own fp16 compression do not scale, so there small gradients vanish.
    """

    def sum_(self, gradients: FlatGradients) -> int:
        """See `GradientSum`. A value that is no number on one rank makes all values NaN on all."""
        flat = gradients.flat
        bound = float(self._ranks.sum(np.array([float(flat.abs().max())]))[0])
        sent = ring_bytes(8, self._ranks.size)
        if bound == 0.0:
            return sent
        if not math.isfinite(bound):
            flat.fill_(math.nan)
            return sent
        exponent = math.floor(math.log2(HALF_PRECISION_TOP / bound))
        # In two factors: one alone may leave the range of float32 where gradients are tiny.
        half = exponent // 2
        scaled = (flat * 2.0**half * 2.0 ** (exponent - half)).half()
        self._ranks.sum_(scaled)
        flat.copy_(scaled)
        flat.mul_(2.0**-half).mul_(2.0 ** (half - exponent))
        return sent + ring_bytes(scaled.nbytes, self._ranks.size)


class PowerSgdSum(GradientSum):
    """Low-rank sums that pay back in later steps what they left out.

    Vogels, Karimireddy and Jaggi, "PowerSGD" (2019): each gradient matrix M is sent as P (rows x
    rank) and Q (columns x rank), others as they are. One step of power iteration, started from the
    last step's Q: P is the sum of the ranks' M Q, its columns made orthonormal; Q is the sum of
    their Mᵀ P. Both are linear in M, so what all get is the projection of the summed matrix on P's
    columns, whatever the number of ranks. Exact where the rank of M is at most that of P.

    A checkpoint holds the sum over the ranks of what they left out, by parameter. When it is
    loaded, each rank takes an equal share, so on another number of ranks nothing is lost either.
    torch's own hook keeps that state by bucket and rank, see docs/decisions.
    """

    def __init__(self, ranks: Communicator, rank: int = POWERSGD_RANK) -> None:
        super().__init__(ranks)
        self._rank = rank
        self._left_out: dict[str, Tensor] = {}
        self._right: dict[str, Tensor] = {}

    def sum_(self, gradients: FlatGradients) -> int:
        """See `GradientSum`. A value that is no number on one rank makes all values NaN on all.

        What was left out earlier is then kept.
        """
        for name, left_out in self._left_out.items():
            gradients.views[name].add_(left_out.to(gradients.flat.device))
        matrices = self._matrices(gradients)
        whole = [view for name, view in gradients.views.items() if name not in matrices]
        left = [matrix @ self._start(name, matrix) for name, matrix in matrices.items()]
        summed, first_bytes = self._sum_together([*left, *whole])
        # QR gives orthonormal columns for any P: a gradient that was 0 costs no direction. Each
        # rank does it for itself, from equal sums: equal processors get equal weights.
        left = [torch.linalg.qr(p).Q for p in summed[: len(left)]]
        own = [matrix.T @ p for matrix, p in zip(matrices.values(), left, strict=True)]
        right, second_bytes = self._sum_together(own)

        total = _assembled(gradients, list(matrices), left, right, summed[len(left) :])
        # The total is equal on all ranks, hence the choice too.
        if bool(torch.isfinite(total).all()):
            sent = _assembled(gradients, list(matrices), left, own, whole)
            self._left_out = gradients.views_of(gradients.flat - sent)
            self._right = dict(zip(matrices, right, strict=True))
            gradients.flat.copy_(total)
        else:
            gradients.flat.fill_(math.nan)
        return first_bytes + second_bytes

    def _matrices(self, gradients: FlatGradients) -> dict[str, Tensor]:
        """Gradients that are larger than their factors, in shape (rows, columns)."""
        matrices = {n: view.flatten(1) for n, view in gradients.views.items() if view.ndim > 1}
        return {
            name: matrix
            for name, matrix in matrices.items()
            if sum(matrix.shape) * min(self._rank, *matrix.shape) < matrix.numel()
        }

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        """The last step's Q; in the first step, or after one of another rank, random numbers."""
        shape = (matrix.shape[1], min(self._rank, *matrix.shape))
        known = self._right.get(name)
        if known is None or known.shape != shape:
            known = torch.randn(shape, generator=torch.Generator().manual_seed(START_SEED))
        return known.to(matrix.device)

    def _sum_together(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """Sums over all ranks in one collective, and the bytes that this rank sent."""
        if not tensors:
            return [], 0
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._ranks.sum_(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        summed = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        return summed, ring_bytes(flat.nbytes, self._ranks.size)

    def state(self) -> State:
        """See `GradientSum`; the factors are equal on all ranks."""
        summed = {name: left_out.clone() for name, left_out in self._left_out.items()}
        for tensor in summed.values():
            self._ranks.sum_(tensor)
        return {
            RESIDUAL: {name: tensor.cpu() for name, tensor in summed.items()},
            FACTORS: {name: factor.cpu().clone() for name, factor in self._right.items()},
        }

    def load(self, state: State) -> None:
        """See `GradientSum`."""
        left_out: dict[str, Tensor] = state.get(RESIDUAL, {})
        self._left_out = {name: value / self._ranks.size for name, value in left_out.items()}
        self._right = {name: factor.clone() for name, factor in state.get(FACTORS, {}).items()}


def _assembled(
    like: FlatGradients,
    names: Sequence[str],
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    whole: Sequence[Tensor],
) -> Tensor:
    """A flat buffer of all gradients, from the factors of `names` and the rest as it was sent."""
    flat = torch.empty_like(like.flat)
    views = like.views_of(flat)
    for name, p, q in zip(names, left, right, strict=True):
        views[name].copy_((p @ q.T).view_as(views[name]))
    for name, value in zip([n for n in views if n not in names], whole, strict=True):
        views[name].copy_(value)
    return flat
