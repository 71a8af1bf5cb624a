"""Where a rank's rows come from: what the training loop sees of reading, and nothing more.

The loop asks for the batches of an epoch from some step on, and for all validation rows in blocks.
Whether rows lie in memory or are read from files as they are needed is the source's business.

The order in which the rows of a virtual shard come in an epoch.

An order is a function of (seed, epoch, shard, rows of the shard) and two sizes alone. It does not
depend on the number of ranks or threads, nor on whether the rows lie in memory or in a file, and
any place in it can be computed without what comes before.

A shard is cut into pieces of neighbouring rows. Pieces are shuffled, consecutive ones form pools,
and the rows of a pool are shuffled with each other. Where a shard is one pool, its order is a
uniformly random permutation. Otherwise a pool mixes pieces from all over the shard: with pieces of
64 rows a pool of 32,768 holds 512 of them, so even where neighbours are alike (one day's flights)
batches of one pool differ from those of the next hardly more than by chance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.training.core.schedule import StepPlan
from tasks.training.data.config import ReadingMode
from tasks.training.data.decode import RowFacts, RowLayout
from tasks.training.data.preprocess import Float32Array, Int32Array, Int64Array, Preprocessing
from tasks.training.strategies.base import Batch


@dataclass(frozen=True)
class Pool:
    """Rows of one shard that are shuffled with each other.

    Args:
        first_row: place of the pool's first row in the epoch's order of the shard.
        starts: first row of each range of the shard that is to be read, increasing.
        stops: end of each range.
        order: places in the ranges' rows, laid end to end, in the order in which they come.
    """

    first_row: int
    starts: Int64Array
    stops: Int64Array
    order: Int64Array

    @property
    def num_rows(self) -> int:
        """Rows of the pool."""
        return len(self.order)

    def rows(self) -> Int64Array:
        """Row numbers in the shard, in the order in which they come."""
        ordered: Int64Array = laid_out(self.starts, self.stops)[self.order]
        return ordered


@dataclass(frozen=True)
class ShardOrder:
    """Orders of one shard's rows, one for each epoch.

    Args:
        shard: the shard's number.
        num_rows: rows of the shard.
        seed: of the run.
        pool_rows: rows of a pool, about.
        piece_rows: neighbouring rows that are read together.
    """

    shard: int
    num_rows: int
    seed: int
    pool_rows: int
    piece_rows: int

    def pools(self, epoch: int, first_row: int = 0) -> Iterator[Pool]:
        """Pools of an epoch from the one that holds place `first_row` on."""
        num_pieces = -(-self.num_rows // self.piece_rows)
        if num_pieces == 0:
            return
        num_pools = min(num_pieces, max(1, -(-self.num_rows // self.pool_rows)))
        pieces = np.random.default_rng((self.seed, epoch, self.shard)).permutation(num_pieces)
        begin = 0
        for number, members in enumerate(np.array_split(pieces, num_pools)):
            starts = np.sort(members) * self.piece_rows
            stops = np.minimum(starts + self.piece_rows, self.num_rows)
            size = int((stops - starts).sum())
            if begin + size > first_row:
                # A pool's own number keeps its generator apart from the one of the pieces.
                generator = np.random.default_rng((self.seed, epoch, self.shard, 1 + number))
                yield Pool(begin, *merged_ranges(starts, stops), generator.permutation(size))
            begin += size


def laid_out(starts: Int64Array, stops: Int64Array) -> Int64Array:
    """All numbers of some half-open ranges, one range after the other."""
    lengths = stops - starts
    offsets = np.cumsum(lengths) - lengths
    numbers: Int64Array = np.arange(lengths.sum()) + np.repeat(starts - offsets, lengths)
    return numbers


def merged_ranges(starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Join increasing ranges of which one begins where the other ends: fewer, longer reads."""
    apart = starts[1:] != stops[:-1]
    return starts[np.append(True, apart)], stops[np.append(apart, True)]


BLOCK_ROWS = 8192


class RowSource(ABC):
    """One rank's rows of one window. Batches lie on the CPU.

    `Batch.inputs` is (positions, numeric): int64 (rows, categorical columns) from
    `Preprocessing.category_positions`, and float32 (rows, numeric columns), NaN for missing.
    `Batch.labels` is float32 (rows,): 0 or 1, or the number of a regression; where there is a
    teacher float32 (rows, 2): its answer, which only training rows have, and the label.

    Args:
        facts: of each of the rank's shards.
        layout: of their words.
        preprocessing: gives positions to categories.
        shuffle: which rows a step takes.
        pinned: batches in page-locked memory, from which copies to a GPU need not wait.
    """

    def __init__(
        self,
        facts: Mapping[int, RowFacts],
        layout: RowLayout,
        preprocessing: Preprocessing,
        shuffle: Shuffle,
        *,
        pinned: bool,
    ) -> None:
        self.sizes = {shard: of_shard.num_rows for shard, of_shard in facts.items()}
        """Rows of each of the rank's shards, in order; empty on a rank that holds no shard."""
        self.num_rows = sum(self.sizes.values())
        """Rows of this rank."""
        self._layout = layout
        self._preprocessing = preprocessing
        self._shuffle = shuffle
        self._pinned = pinned

    @abstractmethod
    def batches(self, epoch: int, first_step: int = 0) -> Generator[Batch, None, None]:
        """One batch for each step of an epoch, from `first_step` on.

        A step takes equally many rows of each shard, so a step of all ranks holds the same rows
        whatever their number, and a step is the same whether or not the ones before it were read.
        A rank without shards gets batches without rows. Close the iterator (or let it end) to stop
        what reads ahead.

        Raises:
            TransientError: a file of decoded rows was cut or cannot be read.
        """

    @abstractmethod
    def blocks(self) -> Generator[Batch, None, None]:
        """All rows once, in their order, at most `BLOCK_ROWS` at a time; none where there is none.

        Raises:
            TransientError: as `batches`.
        """

    def _empty(self, num_rows: int) -> Batch:
        """A batch to be filled."""

        def made(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, pin_memory=self._pinned)

        layout = self._layout
        positions = made(num_rows, layout.num_categorical, dtype=torch.int64)
        numeric = made(num_rows, layout.num_numeric, dtype=torch.float32)
        labels = made(*layout.target_shape(num_rows), dtype=torch.float32)
        return Batch((positions, numeric), labels)


@dataclass(frozen=True)
class Sources:
    """What `open_sources` gives a rank.

    Args:
        training: this rank's training rows.
        validation: this rank's validation rows; may be none.
        preprocessing: fitted on all ranks' training rows; equal on all ranks.
        plan: steps of an epoch; equal on all ranks.
        num_training_rows: of all ranks.
        mode: how rows are read; equal on all ranks.
        reason: the rule that chose the mode, with its numbers, as a sentence.
    """

    training: RowSource
    validation: RowSource
    preprocessing: Preprocessing
    plan: StepPlan
    num_training_rows: int
    mode: ReadingMode
    reason: str

    def no_rows(self) -> Batch:
        """A batch without rows, for a rank that must take part and has none left."""
        num_categories = len(self.preprocessing.vocabularies)
        positions = torch.empty(0, num_categories, dtype=torch.int64)
        numeric = torch.empty(0, len(self.preprocessing.edges))
        return Batch((positions, numeric), torch.empty(0))


@dataclass(frozen=True)
class Shuffle:
    """What decides which rows a step takes, on every rank alike.

    Args:
        seed: of the run.
        pool_rows: rows of one shard that are shuffled with each other.
        piece_rows: neighbouring rows that are read together.
        plan: steps of an epoch.
    """

    seed: int
    pool_rows: int
    piece_rows: int
    plan: StepPlan

    def pools(self, shard: int, num_rows: int, epoch: int, first_step: int) -> Iterator[Pool]:
        """Pools of a shard that an epoch takes rows of from `first_step` on."""
        order = ShardOrder(shard, num_rows, self.seed, self.pool_rows, self.piece_rows)
        end = self.plan.num_steps * self.plan.rows_per_shard
        for pool in order.pools(epoch, first_step * self.plan.rows_per_shard):
            if pool.first_row >= end:
                return
            yield pool


def inputs_of(
    words: Int32Array, layout: RowLayout, preprocessing: Preprocessing
) -> tuple[Int64Array, Float32Array, Float32Array]:
    """Positions, numbers and targets of some rows of words; the latter two are views."""
    positions = preprocessing.category_positions(layout.codes(words))
    return positions, layout.numeric(words), layout.targets(words)
