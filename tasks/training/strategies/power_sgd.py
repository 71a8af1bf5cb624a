"""Low-rank compression of gradients: Vogels, Karimireddy and Jaggi, "PowerSGD" (2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.training.strategies.base import Exchange, State
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.flat_gradients import FlatGradients
from tasks.training.strategies.gradient_compression import ErrorFeedback, views_of

# Where the first power iteration starts: anywhere, but on all ranks at the same place.
START_SEED = 20190531
# Where a checkpoint keeps the factors that the next power iteration starts from.
FACTORS = "powersgd_right"


@dataclass(frozen=True)
class LowRank:
    """Sizes of one gradient matrix's low-rank form P Qᵀ."""

    rows: int
    columns: int
    rank: int

    @classmethod
    def of(cls, shape: torch.Size, rank: int) -> LowRank | None:
        """The form of a gradient; None where it would not be smaller than the gradient.

        The first dimension makes the rows, all others the columns.
        """
        if len(shape) < 2 or shape.numel() == 0:
            return None
        rows, columns = shape[0], shape.numel() // shape[0]
        fitting = min(rank, rows, columns)
        if (rows + columns) * fitting >= rows * columns:
            return None
        return cls(rows, columns, fitting)


class PowerSgdSum(ErrorFeedback):
    """Sends each gradient matrix M as P (rows x rank) and Q (columns x rank); others as they are.

    One step of power iteration, started from the last step's Q: P is the sum of the ranks' M Q, its
    columns made orthonormal; Q is the sum of their Mᵀ P. Both are linear in M, so what all get is
    the projection of the summed matrix on P's columns, whatever the number of ranks. Exact where
    the rank of M is at most that of P.

    Each rank makes P orthonormal for itself, from equal sums: equal processors get equal weights.
    """

    def __init__(self, config: StrategyConfig, exchange: Exchange) -> None:
        super().__init__(config, exchange)
        self._right: dict[str, Tensor] = {}

    def _compressed_sum(self, owed: FlatGradients) -> tuple[Tensor, Tensor, int]:
        forms = self._forms(owed)
        whole = [view for name, view in owed.views.items() if name not in forms]
        matrices = [owed.views[name].view(form.rows, form.columns) for name, form in forms.items()]
        starts = [self._start(name, form, owed.flat.device) for name, form in forms.items()]

        left = [matrix @ start for matrix, start in zip(matrices, starts, strict=True)]
        summed, first_bytes = self._sum_together([*left, *whole])
        left, whole_sums = summed[: len(left)], summed[len(left) :]
        # QR gives orthonormal columns for any P: a gradient that was 0 costs no direction.
        left = [torch.linalg.qr(p).Q for p in left]
        own_right = [matrix.T @ p for matrix, p in zip(matrices, left, strict=True)]
        right, second_bytes = self._sum_together(own_right)

        total = self._assembled(owed, forms, left, right, whole_sums)
        sent = self._assembled(owed, forms, left, own_right, whole)
        if bool(torch.isfinite(total).all()):
            self._right = dict(zip(forms, right, strict=True))
        return total, sent, first_bytes + second_bytes

    def _forms(self, gradients: FlatGradients) -> dict[str, LowRank]:
        found = {
            name: LowRank.of(view.shape, self._config.powersgd_rank)
            for name, view in gradients.views.items()
        }
        return {name: form for name, form in found.items() if form is not None}

    def _start(self, name: str, form: LowRank, device: torch.device) -> Tensor:
        """The last step's Q; in the first step, or after one of another rank, random numbers."""
        known = self._right.get(name)
        if known is not None and known.shape == (form.columns, form.rank):
            return known.to(device)
        generator = torch.Generator().manual_seed(START_SEED)
        return torch.randn(form.columns, form.rank, generator=generator).to(device)

    def _assembled(
        self,
        like: FlatGradients,
        forms: dict[str, LowRank],
        left: list[Tensor],
        right: list[Tensor],
        whole: list[Tensor],
    ) -> Tensor:
        """A flat buffer of all gradients, from factors and from tensors that were sent whole."""
        flat = torch.empty_like(like.flat)
        views = views_of(flat, like)
        for name, p, q in zip(forms, left, right, strict=True):
            views[name].copy_((p @ q.T).view_as(views[name]))
        for name, value in zip([n for n in views if n not in forms], whole, strict=True):
            views[name].copy_(value)
        return flat

    def state(self) -> State:
        """See `ErrorFeedback.state`; the factors are equal on all ranks."""
        return {**super().state(), FACTORS: {n: q.cpu().clone() for n, q in self._right.items()}}

    def load(self, state: State) -> None:
        """See `ErrorFeedback.load`."""
        super().load(state)
        self._right = {name: factor.clone() for name, factor in state.get(FACTORS, {}).items()}
