"""Rows of a rank in memory: looked up once, then gathered for each step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.training.data.decode import RowLayout
from tasks.training.data.preprocess import Int32Array, Preprocessing
from tasks.training.data.source import BLOCK_ROWS, RowSource, Shuffle, inputs_of
from tasks.training.data.store import MemoryStore
from tasks.training.strategies.base import Batch


@dataclass(frozen=True)
class ShardTensors:
    """All rows of one shard as the network takes them, on the CPU."""

    positions: Tensor
    numeric: Tensor
    labels: Tensor

    @classmethod
    def of(
        cls, parts: list[Int32Array], layout: RowLayout, preprocessing: Preprocessing
    ) -> ShardTensors:
        """Look up the categories of all rows; `parts` are let go one by one, to save memory."""
        num_rows = sum(map(len, parts))
        positions = np.empty((num_rows, layout.num_categorical), dtype=np.int64)
        numeric = np.empty((num_rows, layout.num_numeric), dtype=np.float32)
        labels = np.empty(layout.target_shape(num_rows), dtype=np.float32)
        begin = 0
        parts.reverse()
        while parts:
            words = parts.pop()
            rows = slice(begin, begin + len(words))
            positions[rows], numeric[rows], labels[rows] = inputs_of(words, layout, preprocessing)
            begin = rows.stop
        return cls(torch.from_numpy(positions), torch.from_numpy(numeric), torch.from_numpy(labels))

    def gather(self, rows: Tensor, batch: Batch, begin: int) -> None:
        """Copy some rows into a batch, from its row `begin` on."""
        end = begin + len(rows)
        positions, numeric = batch.inputs
        torch.index_select(self.positions, 0, rows, out=positions[begin:end])
        torch.index_select(self.numeric, 0, rows, out=numeric[begin:end])
        torch.index_select(self.labels, 0, rows, out=batch.labels[begin:end])


class MemoryRows(RowSource):
    """One rank's rows in memory; its arguments are those of `RowSource`, but for `store`.

    Args:
        store: decoded rows, which are taken out of it.
    """

    def __init__(
        self,
        store: MemoryStore,
        layout: RowLayout,
        preprocessing: Preprocessing,
        shuffle: Shuffle,
        *,
        pinned: bool,
    ) -> None:
        super().__init__(store.facts, layout, preprocessing, shuffle, pinned=pinned)
        self._shards = {
            shard: ShardTensors.of(store.take(shard), layout, preprocessing) for shard in self.sizes
        }

    def batches(self, epoch: int, first_step: int = 0) -> Generator[Batch, None, None]:
        """One batch for each step of an epoch, from `first_step` on."""
        plan = self._shuffle.plan
        rows = {shard: self._rows(shard, epoch, first_step) for shard in self._shards}
        for _ in range(first_step, plan.num_steps):
            batch = self._empty(len(rows) * plan.rows_per_shard)
            for number, (shard, of_steps) in enumerate(rows.items()):
                begin = number * plan.rows_per_shard
                self._shards[shard].gather(next(of_steps), batch, begin)
            yield batch

    def blocks(self) -> Generator[Batch, None, None]:
        """All rows once, in their order, at most `BLOCK_ROWS` at a time."""
        for tensors in self._shards.values():
            for rows in torch.split(torch.arange(len(tensors.labels)), BLOCK_ROWS):
                if len(rows):
                    batch = self._empty(len(rows))
                    tensors.gather(rows, batch, 0)
                    yield batch

    def _rows(self, shard: int, epoch: int, first_step: int) -> Iterator[Tensor]:
        """Row numbers of each step."""
        size = self._shuffle.plan.rows_per_shard
        done = first_step * size
        left = np.empty(0, dtype=np.int64)
        for pool in self._shuffle.pools(shard, self.sizes[shard], epoch, first_step):
            rows = pool.rows()[max(0, done - pool.first_row) :]
            left = np.concatenate([left, rows])
            whole = len(left) // size * size
            yield from torch.from_numpy(left[:whole]).view(-1, size)
            left = left[whole:]
