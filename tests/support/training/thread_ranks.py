"""Ranks as threads of one process that talk through memory: our boundary, faked."""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.training.strategies.base import Communicator
from tasks.training.strategies.optimizer import FlatGradients

Result = TypeVar("Result")
LIMIT_S = 60


class Room:
    """Where the ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.table = [torch.empty(0)] * size


class ThreadCommunicator(Communicator):
    """Collectives of one thread; counts the payload that it gives away."""

    def __init__(self, room: Room, rank: int) -> None:
        self._room = room
        self.rank = self.local_rank = rank
        self.size = self.local_size = room.size
        self.given_bytes = 0

    def _all(self, value: Tensor) -> list[Tensor]:
        self._room.table[self.rank] = value
        self._room.barrier.wait()
        table = list(self._room.table)
        self._room.barrier.wait()
        return table

    def shut_down(self) -> None:
        """Nothing to leave."""

    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        self.given_bytes += tensor.nbytes
        tensor.copy_(torch.stack(self._all(tensor.clone())).sum(0))
        return lambda: None

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        given = self.given_bytes
        total = super().sum(values)
        self.given_bytes = given  # gradients alone are counted
        return total

    def gather(self, rows: Tensor) -> list[Tensor]:
        return self._all(rows)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            first = self._all(tensor.detach().clone())[0]
            with torch.no_grad():
                tensor.copy_(first)


def on_threads(size: int, part: Callable[[ThreadCommunicator], Result]) -> list[Result]:
    """What each of `size` ranks returns; raises what the first failed one raised."""
    room = Room(size)

    def guarded(rank: int) -> Result:
        try:
            return part(ThreadCommunicator(room, rank))
        except BaseException:
            room.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
    failures = [failure for future in futures if (failure := future.exception())]
    # Of a failed rank and those that it left at the barrier, the failed one.
    failures.sort(key=lambda failure: isinstance(failure, threading.BrokenBarrierError))
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


def gradients_of(tensors: Mapping[str, Tensor]) -> FlatGradients:
    """Gradients with these values."""
    flat = FlatGradients((name, nn.Parameter(torch.empty_like(t))) for name, t in tensors.items())
    for name, tensor in tensors.items():
        flat.views[name].copy_(tensor)
    return flat
