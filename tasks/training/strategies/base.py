"""How ranks train one network together: what the training loop sees of it, and nothing more.

The loop hands over batches and gets losses; forward, backward, the sum of gradients, precision and
the optimizer's step belong to the strategy. So the loop is the same on Horovod and on
torch.distributed, with whole replicas and with a network cut over ranks.

One rule makes strategies and world sizes interchangeable: the loss of a step is the sum of all
rows' losses over all ranks, divided by the rows of the global batch. A gradient is the sum of the
ranks' shares, never a mean of means, so ranks may have unequal numbers of rows.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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

Cut = Literal["outputs", "inputs", "units"]
"""How a module is cut: a linear layer by outputs or by inputs, a dropout by the units it meets."""

# Where each strategy is, by name: imported when it is chosen, since each brings in libraries of its
# own. All are built with the arguments of `DataParallel`.


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


class Communicator(ABC):
    """Collectives of one rank; every rank must call each method, in the same order.

    Nothing that travels is pickled: numbers travel as tensors, small values as JSON.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def local_rank(self) -> int:
        """This rank's number on its host."""

    @property
    @abstractmethod
    def local_size(self) -> int:
        """Number of ranks on this host."""

    @abstractmethod
    def shut_down(self) -> None:
        """Leave the job in good order; to be called once, after the last collective."""

    @abstractmethod
    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        """Start to replace `tensor` by its sum over all ranks; what is returned waits for it.

        Args:
            tensor: contiguous; not to be touched before the wait is over.
            name: equal on all ranks, and no other sum of that name is under way.
        """

    @abstractmethod
    def gather(self, rows: Tensor) -> list[Tensor]:
        """Each rank's `rows`, on the CPU; their number may differ between ranks."""

    @abstractmethod
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by rank 0's."""

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""
        self.begin_sum_(tensor, "sum")()

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Elementwise sum of float64 `values` over all ranks."""
        total = torch.from_numpy(values.copy())
        self.sum_(total)
        return total.numpy()

    def minimum(self, value: int) -> int:
        """Smallest `value` of all ranks."""
        return min(int(of_rank) for of_rank in self.gather(torch.tensor([value])))

    def from_rank_0(self, value: int) -> int:
        """The `value` of rank 0."""
        shared = torch.tensor([value])
        self.broadcast_([shared])
        return int(shared.item())

    def gather_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """All ranks' float32 `rows` (equal columns), one rank's after the other's."""
        return torch.cat(self.gather(torch.from_numpy(rows))).numpy()

    def gather_values(self, value: object) -> list[object]:
        """The JSON-serializable `value` of every rank, in rank order."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(of_rank.numpy().tobytes()) for of_rank in self.gather(text)]


def _no_phase(_: str) -> AbstractContextManager[object]:
    return nullcontext()


class Strategy(ABC):
    """One rank's part in training one network. All methods are collective."""

    name: ClassVar[str]

    is_cut: ClassVar[bool] = False
    """True where ranks hold parts of the network, and each writes its own into a checkpoint."""

    wire_bytes: int = 0
    """Bytes of gradients and weights that this rank has sent to others so far, as far as the
    strategy sees them."""

    phase: Callable[[str], AbstractContextManager[object]] = staticmethod(_no_phase)
    """Called with "exchange" around what a step waits for other ranks; a clock's may be set."""

    @property
    @abstractmethod
    def num_skipped_steps(self) -> int:
        """Steps that all ranks left out because an fp16 gradient overflowed."""

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

        Where the network is cut over ranks this is a collective: each rank must call it equally
        often, with no rows when it has none left.
        """

    @abstractmethod
    def state(self) -> State:
        """`network` and `optimizer` as plain whole state dicts on the CPU, whatever the strategy.

        `network` maps parameter and buffer names to tensors; `optimizer` maps "name/field" to
        tensors and numbers, such as "perceptron.0.weight/exp_avg". What belongs to the strategy
        alone (a gradient scaler, error feedback) is under `strategy`.
        """

    def own_state(self) -> State:
        """As `state`, but of what is cut over ranks the `TensorRows` that this rank holds."""
        return self.state()

    @abstractmethod
    def judged_with(self, weights: State) -> AbstractContextManager[None]:
        """Evaluate with other weights inside the context, and train on with the own ones after it.

        Args:
            weights: whole tensors by the names of `state`'s `network`, the same on all ranks.
        """

    @abstractmethod
    def load(self, state: State) -> None:
        """Take over what `state` of any strategy and world size gave."""

    @abstractmethod
    def checksum(self) -> list[float]:
        """One float64 sum for each parameter of this rank's replica, equal on all replicas."""


def cut_evenly(sizes: Sequence[int], num_parts: int) -> list[slice]:
    """Cut blocks into parts that follow each other, the largest as small as can be.

    Args:
        sizes: size of each block, such as its parameters.
        num_parts: parts; none is empty, so there must be at least as many blocks.

    Returns:
        The blocks of each part.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:  # the smallest bound under which the parts are enough
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    starts = _filled(sizes, low)
    # Where fewer parts are enough, blocks that share one are separated from the end.
    free = [block for block in reversed(range(len(sizes))) if block not in starts]
    starts = sorted([*starts, *free[: num_parts - len(starts)]])
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _filled(sizes: Sequence[int], bound: int) -> list[int]:
    """First blocks of the parts that come from filling each up to `bound`."""
    starts, filled = [0], 0
    for block, size in enumerate(sizes):
        if filled + size > bound:
            starts.append(block)
            filled = 0
        filled += size
    return starts
