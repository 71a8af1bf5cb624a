"""A rank's rows as the training loop takes them: the batches of an epoch, validation in blocks.

A pool of rows is read, shuffled and looked up at once; a batch copies slices of ready pools
together. Pools are read in the order in which they are needed, so the number of threads changes no
batch. Without a thread the kernel reads from disk ahead; the rest of the work has to be done on the
rank's core in either case. NumPy does it, since it keeps to one core, where PyTorch would start
threads of its own.

The order of a shard's rows is a function of (seed, epoch, shard, rows of the shard) and two sizes
alone. It depends neither on the number of ranks nor of threads, and any position in it can be
computed without what comes before. A shard is cut into pieces of neighbouring rows. Pieces are
shuffled, consecutive ones form pools, and the rows of a pool are shuffled with each other. Where a
shard is one pool, its order is a uniformly random permutation. Otherwise a pool mixes pieces from
all over the shard: with pieces of 64 rows a pool of 32,768 holds 512 of them, so even where
neighbours are alike (one day's flights) batches of one pool differ from those of the next hardly
more than by chance.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch

from tasks.training.core.objective import StepPlan
from tasks.training.data.preprocess import Float32Array, Int64Array, Preprocessing
from tasks.training.data.store import RowStore
from tasks.training.strategies.base import Batch

BLOCK_ROWS = 8192


@dataclass(frozen=True)
class Pool:
    """Rows of one shard that are read and shuffled together.

    Args:
        shard: the shard's number.
        first_row: position of the pool's first row in the epoch's order of the shard.
        starts: first row of each range of the shard that is to be read, increasing.
        stops: end of each range.
        order: positions in the ranges' rows, laid end to end, in the order in which they come.
    """

    shard: int
    first_row: int
    starts: Int64Array
    stops: Int64Array
    order: Int64Array


@dataclass(frozen=True)
class Shuffle:
    """What decides in which order rows come, on every rank alike.

    Args:
        seed: of the run.
        pool_rows: rows of one shard that are shuffled with each other, about.
        piece_rows: neighbouring rows that are read together.
    """

    seed: int
    pool_rows: int
    piece_rows: int

    def pools(self, shard: int, num_rows: int, epoch: int, first_row: int = 0) -> Iterator[Pool]:
        """Pools of an epoch of a shard from the one that holds position `first_row` on."""
        num_pieces = -(-num_rows // self.piece_rows)
        if num_pieces == 0:
            return
        num_pools = min(num_pieces, max(1, -(-num_rows // self.pool_rows)))
        pieces = np.random.default_rng((self.seed, epoch, shard)).permutation(num_pieces)
        begin = 0
        for number, members in enumerate(np.array_split(pieces, num_pools)):
            starts = np.sort(members) * self.piece_rows
            stops = np.minimum(starts + self.piece_rows, num_rows)
            size = int((stops - starts).sum())
            if begin + size > first_row:
                # A pool's own number keeps its generator apart from the one of the pieces.
                generator = np.random.default_rng((self.seed, epoch, shard, 1 + number))
                yield Pool(shard, begin, *merged_ranges(starts, stops), generator.permutation(size))
            begin += size


def merged_ranges(starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Join increasing ranges of which one begins where the other ends: fewer, longer reads."""
    apart = starts[1:] != stops[:-1]
    return starts[np.append(True, apart)], stops[np.append(apart, True)]


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
        positions.numpy()[target] = self.positions[rows]
        numeric.numpy()[target] = self.numeric[rows]
        batch.labels.numpy()[target] = self.labels[rows]
        self.done += count


@dataclass(eq=False)
class RowSource:
    """One rank's rows of one window. Batches are on the CPU.

    `Batch.inputs` is (positions, numeric): int64 (rows, categorical columns) from
    `Preprocessing.category_positions`, and float32 (rows, numeric columns), NaN for missing.
    `Batch.labels` is float32 (rows,): 0 or 1, or the number of a regression; where there is a
    teacher float32 (rows, 2): its output, which only training rows have, and the label.

    Args:
        store: decoded rows of the rank's shards.
        preprocessing: gives positions to categories.
        shuffle: in which order rows come.
        plan: how many rows a step takes.
        num_threads: threads that read ahead; 0: the kernel does.
        pinned: batches in page-locked memory, from which copies to a GPU need not wait.
    """

    store: RowStore
    preprocessing: Preprocessing
    shuffle: Shuffle
    plan: StepPlan
    num_threads: int = 0
    pinned: bool = False

    def __post_init__(self) -> None:
        self.sizes = {shard: of_shard.num_rows for shard, of_shard in self.store.facts.items()}
        """Rows of each of the rank's shards, in order; empty on a rank that holds no shard."""
        self.num_rows = sum(self.sizes.values())
        """Rows of this rank."""

    def batches(self, epoch: int, first_step: int = 0) -> Generator[Batch, None, None]:
        """One batch for each step of an epoch, from `first_step` on.

        A step takes equally many rows of each shard, so a step of all ranks holds the same rows
        whatever their number, and a step is the same whether or not the ones before it were read.
        A rank without shards gets batches without rows. Close the iterator (or let it end) to stop
        what reads ahead.

        Raises:
            TransientError: a file of decoded rows was cut or cannot be read.
        """
        rows, shards = self.plan.rows_per_shard, list(self.sizes)
        # One pool of each shard is read ahead of the one that batches are made of.
        ahead = self._read_ahead(self._needed(epoch, first_step), len(shards))
        with closing(ahead):
            current: dict[int, LoadedRows] = {}
            for _ in range(first_step, self.plan.num_steps):
                batch = self.empty(len(shards) * rows)
                for number, shard in enumerate(shards):
                    filled, end = number * rows, (number + 1) * rows
                    while filled < end:
                        if shard not in current or not current[shard].num_left:
                            current[shard] = next(ahead)
                        count = min(end - filled, current[shard].num_left)
                        current[shard].move(batch, filled, count)
                        filled += count
                yield batch

    def blocks(self) -> Generator[Batch, None, None]:
        """All rows once, in their order, at most `BLOCK_ROWS` at a time; none where there is none.

        Raises:
            TransientError: as `batches`.
        """
        blocks = (
            Pool(shard, start, np.array([start]), np.array([stop]), np.arange(stop - start))
            for shard, size in self.sizes.items()
            for start in range(0, size, BLOCK_ROWS)
            for stop in [min(start + BLOCK_ROWS, size)]
        )
        with closing(self._read_ahead(blocks, 1 + self.num_threads)) as ahead:
            for rows in ahead:
                batch = self.empty(rows.num_left)
                rows.move(batch, 0, rows.num_left)
                yield batch

    def empty(self, num_rows: int) -> Batch:
        """A batch to be filled; one without rows is for a rank that must take part in a step."""
        layout, made = self.store.layout, partial(torch.empty, pin_memory=self.pinned)
        positions = made(num_rows, layout.num_categorical, dtype=torch.int64)
        numeric = made(num_rows, layout.num_numeric, dtype=torch.float32)
        labels = made(num_rows, *([2] if layout.is_distilled else []), dtype=torch.float32)
        return Batch((positions, numeric), labels)

    def _needed(self, epoch: int, first_step: int) -> Iterator[Pool]:
        """Pools in the order in which `batches` needs them; of the first ones what is left."""
        size = self.plan.rows_per_shard
        done, end = first_step * size, self.plan.num_steps * size

        def of_shard(shard: int) -> Iterator[tuple[int, int, Pool]]:
            for pool in self.shuffle.pools(shard, self.sizes[shard], epoch, done):
                if pool.first_row >= end:
                    return
                yield max(first_step, pool.first_row // size), shard, pool

        # A step fills its shards one after the other: pools are needed by step, then by shard.
        for _, _, pool in heapq.merge(*map(of_shard, self.sizes), key=lambda entry: entry[:2]):
            order = pool.order[max(0, done - pool.first_row) :]
            yield Pool(pool.shard, pool.first_row, pool.starts, pool.stops, order)

    def _load(self, pool: Pool) -> LoadedRows:
        layout = self.store.layout
        words = self.store.read(pool.shard, pool.starts, pool.stops).take(pool.order, axis=0)
        positions = self.preprocessing.category_positions(layout.codes(words))
        return LoadedRows(positions, layout.numeric(words), layout.targets(words))

    def _read_ahead(self, pools: Iterable[Pool], limit: int) -> Generator[LoadedRows, None, None]:
        """Rows of `pools` in their order, at most `limit` of them begun and not yet taken."""
        executor = None
        if self.num_threads:
            executor = ThreadPoolExecutor(self.num_threads, thread_name_prefix="row-reader")

        def begin(pool: Pool) -> Callable[[], LoadedRows]:
            if executor is not None:
                return executor.submit(self._load, pool).result
            self.store.expect(pool.shard, pool.starts, pool.stops)
            return partial(self._load, pool)

        coming = map(begin, pools)
        try:
            begun = deque(islice(coming, limit))
            while begun:
                loaded = begun.popleft()()
                begun.extend(islice(coming, 1))
                yield loaded
        finally:
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)
