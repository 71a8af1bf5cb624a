"""Ranks as threads of one process that talk through memory: our boundary, faked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.training.strategies.base import Exchange
from tasks.training.strategies.flat_gradients import FlatGradients

Result = TypeVar("Result")
LIMIT_S = 60


class Room:
    """Where the ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.table: list[object] = [None] * size


class ThreadExchange:
    """Collectives of one thread; counts the payload that it gives away."""

    name = "threads"

    def __init__(self, room: Room, rank: int) -> None:
        self._room = room
        self.rank = self.local_rank = rank
        self.size = self.local_size = room.size
        self.given_bytes = 0

    def _all(self, value: object) -> list[object]:
        self._room.table[self.rank] = value
        self._room.barrier.wait()
        table = list(self._room.table)
        self._room.barrier.wait()
        return table

    def shut_down(self) -> None:
        """Nothing to leave."""

    def sum_(self, tensor: Tensor) -> None:
        self.given_bytes += tensor.nbytes
        all_of_them = self._all(tensor.clone())
        tensor.copy_(torch.stack([part for part in all_of_them if isinstance(part, Tensor)]).sum(0))

    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        self.sum_(tensor)
        return lambda: None

    def group(self, ranks: Sequence[int]) -> Exchange | None:
        raise AssertionError("not asked for here")

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sum(self._all(values), axis=0)  # type: ignore[arg-type, no-any-return]

    def minimum(self, value: int) -> int:
        return min(self._all(value))  # type: ignore[type-var, return-value]

    def from_rank_0(self, value: int) -> int:
        return self._all(value)[0]  # type: ignore[return-value]

    def gather_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        self.given_bytes += rows.nbytes
        return np.concatenate(self._all(rows))  # type: ignore[arg-type]

    def gather_values(self, value: object) -> list[object]:
        return self._all(value)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            first = self._all(tensor.detach().clone())[0]
            with torch.no_grad():
                tensor.copy_(first)  # type: ignore[arg-type]


def on_threads(size: int, part: Callable[[ThreadExchange], Result]) -> list[Result]:
    """What each of `size` ranks returns."""
    room = Room(size)

    def guarded(rank: int) -> Result:
        try:
            return part(ThreadExchange(room, rank))
        except BaseException:
            room.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def gradients_of(tensors: Mapping[str, Tensor]) -> FlatGradients:
    """Gradients with these values."""
    flat = FlatGradients((name, nn.Parameter(torch.empty_like(t))) for name, t in tensors.items())
    for name, tensor in tensors.items():
        flat.views[name].copy_(tensor)
    return flat
