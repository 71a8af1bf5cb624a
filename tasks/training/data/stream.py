"""Rows of a rank read from files of decoded rows while it trains, a bounded number ahead.

A pool of rows is read, shuffled and looked up as a whole; a batch copies slices of ready pools
together. Pools are asked for in the order in which they will be needed, and taken in that order, so
the number of threads changes no batch. Without a thread the kernel is told what comes next and
reads it from disk meanwhile; the rest of the work has to be done on the rank's core in either case.
NumPy does it, since it keeps to one core, where PyTorch would start threads of its own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from tasks.training.data.decode import RowLayout
from tasks.training.data.preprocess import Float32Array, Int64Array, Preprocessing
from tasks.training.data.source import BLOCK_ROWS, Pool, RowSource, Shuffle, inputs_of
from tasks.training.data.store import FileStore
from tasks.training.strategies.base import Batch


@dataclass(frozen=True)
class Load:
    """Rows that are to be read: ranges of a shard, and the order in which they come."""

    shard: int
    starts: Int64Array
    stops: Int64Array
    order: Int64Array | None = None


@dataclass
class LoadedRows:
    """Rows that are ready to be copied into batches, and how many were."""

    positions: Int64Array
    numeric: Float32Array
    labels: Float32Array
    done: int = 0

    @property
    def num_left(self) -> int:
        """Rows not yet copied."""
        return len(self.labels) - self.done

    def move(self, batch: Batch, begin: int, count: int) -> None:
        """Copy the next `count` rows into a batch, from its row `begin` on."""
        rows, target = slice(self.done, self.done + count), slice(begin, begin + count)
        positions, numeric = batch.inputs
        positions[target].copy_(torch.from_numpy(self.positions[rows]))
        numeric[target].copy_(torch.from_numpy(self.numeric[rows]))
        batch.labels[target].copy_(torch.from_numpy(self.labels[rows]))
        self.done += count


class StreamedRows(RowSource):
    """One rank's rows in files; its arguments are those of `RowSource`, but for two.

    Args:
        store: decoded rows.
        num_threads: threads that read ahead; 0: the kernel does.
    """

    def __init__(
        self,
        store: FileStore,
        layout: RowLayout,
        preprocessing: Preprocessing,
        shuffle: Shuffle,
        *,
        num_threads: int,
        pinned: bool,
    ) -> None:
        super().__init__(store.facts, layout, preprocessing, shuffle, pinned=pinned)
        self._store = store
        self._num_threads = num_threads

    def batches(self, epoch: int, first_step: int = 0) -> Generator[Batch, None, None]:
        """One batch for each step of an epoch, from `first_step` on.

        Raises:
            TransientError: a file of decoded rows was cut or cannot be read.
        """
        plan, shards = self._shuffle.plan, list(self.sizes)
        # One pool of each shard is read ahead of the one that batches are made of.
        ahead = self._read_ahead(self._loads(epoch, first_step), len(shards))
        with closing(ahead):
            current: dict[int, LoadedRows] = {}
            for _ in range(first_step, plan.num_steps):
                batch = self._empty(len(shards) * plan.rows_per_shard)
                for number, shard in enumerate(shards):
                    filled, end = number * plan.rows_per_shard, (number + 1) * plan.rows_per_shard
                    while filled < end:
                        if shard not in current or not current[shard].num_left:
                            current[shard] = next(ahead)
                        count = min(end - filled, current[shard].num_left)
                        current[shard].move(batch, filled, count)
                        filled += count
                yield batch

    def blocks(self) -> Generator[Batch, None, None]:
        """All rows once, in their order, at most `BLOCK_ROWS` at a time.

        Raises:
            TransientError: as `batches`.
        """
        loads = (
            Load(shard, np.array([start]), np.array([min(start + BLOCK_ROWS, size)]))
            for shard, size in self.sizes.items()
            for start in range(0, size, BLOCK_ROWS)
        )
        with closing(self._read_ahead(loads, 1 + self._num_threads)) as ahead:
            for rows in ahead:
                batch = self._empty(rows.num_left)
                rows.move(batch, 0, rows.num_left)
                yield batch

    def _loads(self, epoch: int, first_step: int) -> Iterator[Load]:
        """What is to be read, in the order in which `batches` needs it."""
        size = self._shuffle.plan.rows_per_shard
        done = first_step * size

        def of_shard(shard: int) -> Iterator[tuple[int, int, Pool]]:
            for pool in self._shuffle.pools(shard, self.sizes[shard], epoch, first_step):
                yield max(first_step, pool.first_row // size), shard, pool

        # A step fills its shards in turn, so pools are needed by step first, then by shard.
        needed = heapq.merge(*map(of_shard, self.sizes), key=lambda entry: entry[:2])
        for _, shard, pool in needed:
            order = pool.order[max(0, done - pool.first_row) :]
            yield Load(shard, pool.starts, pool.stops, order)

    def _load(self, load: Load) -> LoadedRows:
        words = self._store.read(load.shard, load.starts, load.stops)
        if load.order is not None:
            words = words.take(load.order, axis=0)
        return LoadedRows(*inputs_of(words, self._layout, self._preprocessing))

    def _read_ahead(self, loads: Iterable[Load], limit: int) -> Generator[LoadedRows, None, None]:
        """Rows of `loads` in their order, at most `limit` of them begun and not yet taken."""
        if self._num_threads == 0:
            yield from self._read_in_turn(loads, limit)
            return
        begun: deque[Future[LoadedRows]] = deque()
        executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix="row-reader")
        coming = (executor.submit(self._load, load) for load in loads)
        try:
            begun.extend(islice(coming, limit))
            while begun:
                loaded = begun.popleft().result()
                begun.extend(islice(coming, 1))
                yield loaded
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _read_in_turn(self, loads: Iterable[Load], limit: int) -> Iterator[LoadedRows]:
        """The same in the calling thread; the kernel is told of `limit` loads in advance."""
        coming, told = iter(loads), deque[Load]()
        while True:
            for load in islice(coming, limit - len(told)):
                self._store.expect(load.shard, load.starts, load.stops)
                told.append(load)
            if not told:
                return
            yield self._load(told.popleft())
