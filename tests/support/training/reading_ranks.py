"""Ranks as threads of one process that open and read a snapshot, and what they agree on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import TrainingJob
from tasks.training.data.config import ReadingConfig
from tasks.training.data.opening import open_sources
from tasks.training.data.source import Sources
from tests.support.data.builders import COLUMNS, frame, splits

Result = TypeVar("Result")
WAIT_S = 60.0
NUM_SHARDS = 4


class ThreadCommunicator:
    """Collectives among threads; as `Communicator`, as far as reading needs it."""

    name = "threads"

    def __init__(self, rank: int, size: int, board: list[object], barrier: threading.Barrier):
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self._board = board
        self._barrier = barrier

    def _all(self, value: object) -> list[object]:
        self._board[self.rank] = value
        self._barrier.wait(WAIT_S)
        values = list(self._board)
        self._barrier.wait(WAIT_S)
        return values

    def gather_values(self, value: object) -> list[object]:
        return self._all(value)

    def gather_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.concatenate(self._all(rows))  # type: ignore[arg-type]

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sum(self._all(values), axis=0)  # type: ignore[arg-type, no-any-return]

    def minimum(self, value: int) -> int:
        return min(self._all(value))  # type: ignore[type-var, return-value]

    def from_rank_0(self, value: int) -> int:
        return self._all(value)[0]  # type: ignore[return-value]

    def sum_(self, tensor: Tensor) -> None:
        raise AssertionError("reading exchanges no gradients")

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        raise AssertionError("reading exchanges no weights")

    def shut_down(self) -> None:
        pass


def on_ranks(size: int, work: Callable[[ThreadCommunicator], Result]) -> list[Result]:
    """Do the same work on `size` ranks at once; raise what the first failed one raised."""
    board: list[object] = [None] * size
    barrier = threading.Barrier(size)

    def of_rank(rank: int) -> Result:
        try:
            return work(ThreadCommunicator(rank, size, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(of_rank, rank) for rank in range(size)]
    failures = [f.exception() for f in futures if f.exception() is not None]
    for failure in failures:
        if failure is not None and not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    return [future.result() for future in futures]


def job(
    folder: Path,
    rows: pd.DataFrame | None = None,
    num_shards: int = NUM_SHARDS,
    **reading: object,
) -> TrainingJob:
    path = folder / "data.parquet"
    if rows is not None or not path.exists():
        data = frame(1600) if rows is None else rows
        data.to_parquet(path, row_group_size=100, index=False)
    config = TrainingConfig(
        num_shards=num_shards,
        global_batch_size=8 * num_shards,
        min_category_rows=5,
        num_bins=4,
        reading=ReadingConfig.model_validate(reading),
    )
    return TrainingJob(snapshot_path=path, columns=COLUMNS, splits=splits(), config=config)


def opened(work: TrainingJob, folder: Path, size: int, ranks_per_replica: int = 1) -> list[Sources]:
    def open_rank(exchange: ThreadCommunicator) -> Sources:
        return open_sources(
            work,
            exchange,  # type: ignore[arg-type]
            rank=exchange.rank // ranks_per_replica,
            size=size // ranks_per_replica,
            folder=folder / "rows",
            on_progress=lambda: None,
        )

    return on_ranks(size, open_rank)
