"""How ranks train one network together: what the training loop sees of it, and nothing more.

The loop hands over batches and gets losses; forward, backward, the exchange of gradients, precision
and the optimizer's step belong to the strategy. So the loop is the same on Horovod and on
torch.distributed, with whole replicas and with a network cut over ranks.

One rule makes strategies and world sizes interchangeable: the loss of a step is the sum of all
rows' losses over all ranks, divided by the rows of the global batch. A gradient is the sum of the
ranks' shares, never a mean of means, so ranks may have unequal numbers of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# Plain values and tensors only: what `torch.load(weights_only=True)` accepts.
State = dict[str, Any]

RowLosses = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) to the loss of each row, shape (rows,)."""

OptimizerBuilder = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters to the optimizer that steps them."""


@dataclass(frozen=True)
class Batch:
    """Rows as the network takes them, on the CPU or on the device; all have the same rows."""

    inputs: tuple[Tensor, ...]
    labels: Tensor

    @property
    def num_rows(self) -> int:
        """Rows in the batch; may be 0."""
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """The same rows on `device`; itself where they are there already."""
        if self.labels.device == device:
            return self
        inputs = tuple(part.to(device, non_blocking=True) for part in self.inputs)
        return Batch(inputs, self.labels.to(device, non_blocking=True))


class Exchange(Protocol):
    """Collectives of one rank; every rank must call each method, in the same order.

    Nothing that is exchanged is pickled: numbers travel as tensors, small values as JSON.
    """

    name: str

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""

    def shut_down(self) -> None:
        """Leave the job in good order; to be called once, after the last collective."""

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""

    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        """Start to replace `tensor` by its sum over all ranks; what is returned waits for it.

        Not to be touched before; no other exchange of that `name` may be under way.
        """

    def group(self, ranks: Sequence[int]) -> Exchange | None:
        """An exchange among some ranks; None on the others. Every rank of the job must call it."""

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Elementwise sum of float64 `values` over all ranks."""

    def minimum(self, value: int) -> int:
        """Smallest `value` of all ranks."""

    def from_rank_0(self, value: int) -> int:
        """The `value` of rank 0."""

    def gather_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """All ranks' float32 `rows` (equal columns), one rank's after the other's."""

    def gather_values(self, value: object) -> list[object]:
        """The JSON-serializable `value` of every rank, in rank order."""

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by rank 0's."""


def _no_phase(_: str) -> AbstractContextManager[object]:
    return nullcontext()


class Strategy(ABC):
    """One rank's part in training one network. All methods are collective.

    Args:
        exchange: the other ranks, for everything that is no gradient.
        network: with the same parameters on all ranks or not (rank 0's count), on the CPU.
        row_losses: what is minimised.
        build_optimizer: called once, with the parameters that this rank steps.
        device: where the network is put.
    """

    name: ClassVar[str]

    wire_bytes: int = 0
    """Bytes of gradients and weights that this rank has sent to others so far, as far as the
    strategy sees them."""

    phase: Callable[[str], AbstractContextManager[object]] = staticmethod(_no_phase)
    """Called with "exchange" around what a step waits for other ranks; a clock's may be set."""

    @property
    def num_skipped_steps(self) -> int:
        """Steps that all ranks left out because an fp16 gradient overflowed."""
        return 0

    @property
    @abstractmethod
    def data_rank(self) -> int:
        """Which part of the data this rank reads; ranks that share a replica read the same."""

    @property
    @abstractmethod
    def data_size(self) -> int:
        """Parts that the data is cut into: the number of replicas."""

    @abstractmethod
    def train_step(self, batch: Batch, global_rows: int, learning_rate: float) -> Tensor:
        """Train on this rank's rows of one global batch.

        Args:
            batch: this rank's rows; may be none, the rank takes part all the same.
            global_rows: rows of all ranks in this step.
            learning_rate: of this step.

        Returns:
            Sum of this rank's row losses before the step, float32 scalar on the device, detached.
        """

    @abstractmethod
    def evaluate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Outputs in evaluation mode, float32 on the CPU, for this rank's inputs; no gradient.

        Where the network is cut over ranks this is an exchange: each rank must call it equally
        often, with no rows when it has none left.
        """

    @abstractmethod
    def state(self) -> State:
        """`network` and `optimizer` as plain whole state dicts on the CPU, whatever the strategy.

        `network` maps parameter and buffer names to tensors; `optimizer` maps "name/field" to
        tensors and numbers, such as "perceptron.0.weight/exp_avg". What belongs to the strategy
        alone (a gradient scaler, error feedback) is under `strategy`.
        """

    @abstractmethod
    def judged_with(self, weights: State) -> AbstractContextManager[None]:
        """Evaluate with other weights inside the context, and train on with the own ones after it.

        Args:
            weights: whole tensors by the names of `state`'s `network`, the same on all ranks.
        """

    is_cut: ClassVar[bool] = False
    """True where ranks hold parts of the network, and each writes its own into a checkpoint."""

    def own_state(self) -> State:
        """As `state`, but of what is cut over ranks the `TensorRows` that this rank holds."""
        return self.state()

    @abstractmethod
    def load(self, state: State) -> None:
        """Take over what `state` of any strategy and world size gave."""

    @abstractmethod
    def checksum(self) -> list[float]:
        """One float64 sum for each parameter of this rank's replica, equal on all replicas."""
