"""What a strategy is given: batches, and the collectives by which ranks communicate."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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


class Communicator(ABC):
    """Collectives of one rank; every rank must call each method, in the same order.

    Nothing that travels is pickled: numbers travel as tensors, small values as JSON.
    """

    rank: int
    """This rank's number, from 0."""
    size: int
    """Number of ranks."""
    local_rank: int
    """This rank's number on its host."""
    local_size: int
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
