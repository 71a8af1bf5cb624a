"""Where a rank's rows come from: what the training loop sees of reading, and nothing more.

The loop asks for the batches of an epoch from some step on, and for all validation rows in blocks.
Whether rows lie in memory or are read from files as they are needed is the source's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.training.core.schedule import StepPlan
from tasks.training.data.config import ReadingMode
from tasks.training.data.decode import RowFacts, RowLayout
from tasks.training.data.order import Pool, ShardOrder
from tasks.training.data.preprocess import Float32Array, Int32Array, Int64Array, Preprocessing
from tasks.training.strategies.base import Batch

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
