"""Rows of one rank: which rows of a snapshot belong to it, reading them, and batches of them.

A snapshot's rows are cut into blocks, dealt in turn to V virtual shards; rank r of `size` holds the
shards with shard % size == r. Every step takes equally many rows of each shard, in that shard's own
seeded order, so a global batch holds the same rows whatever the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts import DatasetSchema, TimeWindow
from tasks.errors import DataContractError
from tasks.training.data.preprocess import Float32Array, Int32Array, Int64Array

# With row groups at most this share of a shard, each is one block and is read by one rank alone.
# Larger ones are cut, so that shards stay even; their ranks read them and keep their own rows.
BLOCKS_PER_SHARD = 16


@dataclass(frozen=True)
class ShardRows:
    """One rank's rows of one window, grouped by virtual shard, in snapshot order inside each.

    Args:
        codes: int32, shape (rows, categorical columns).
        numeric: float32, shape (rows, numeric columns); NaN is missing.
        labels: float32 0 or 1, shape (rows,).
        sizes: rows of each of the rank's shards, shard number to count, shards in order.
        category_counts: per categorical column, rows of each category.
    """

    codes: Int32Array
    numeric: Float32Array
    labels: Float32Array
    sizes: Mapping[int, int]
    category_counts: Mapping[str, Mapping[str, int]]

    @property
    def num_rows(self) -> int:
        """Rows of this rank."""
        return len(self.labels)

    def shard_slices(self) -> Iterator[tuple[int, slice]]:
        """Each shard's number, and where its rows are."""
        start = 0
        for shard, size in self.sizes.items():
            yield shard, slice(start, start + size)
            start += size


class ShardReader:
    """Reads one rank's rows of a snapshot, one row group at a time.

    Args:
        path: the snapshot, Parquet.
        columns: which column is what.
        num_shards: virtual shards V.
        rank: this rank.
        num_ranks: all ranks; divides V.
        on_progress: called after each row group.

    Raises:
        DataContractError: the file is no Parquet, or a column is missing or of a wrong type.
    """

    def __init__(
        self,
        path: Path,
        columns: DatasetSchema,
        num_shards: int,
        rank: int,
        num_ranks: int,
        on_progress: Callable[[], None],
    ) -> None:
        try:
            # Dictionary columns: a category's text is decoded once, not once a row.
            self._file = pq.ParquetFile(path, read_dictionary=list(columns.categorical))
        except pa.ArrowInvalid as exc:
            raise DataContractError(
                f"snapshot {path.name} cannot be read as Parquet ({exc}); build it again"
            ) from exc
        self._columns = columns
        self._num_shards = num_shards
        self._rank = rank
        self._num_ranks = num_ranks
        self._on_progress = on_progress
        self._check_types(self._file.schema_arrow)

    def read(self, window: TimeWindow) -> ShardRows:
        """This rank's rows whose event time lies in `window`; it may have none.

        Raises:
            DataContractError: a label is null or neither 0 nor 1.
        """
        groups = [g for g in range(self._file.num_row_groups) if self._may_overlap(g, window)]
        owners = deal_blocks(
            [self._file.metadata.row_group(g).num_rows for g in groups], self._num_shards
        )
        tables, shards = [], []
        for group, group_shards in zip(groups, owners, strict=True):
            mine = group_shards % self._num_ranks == self._rank
            if mine.any():
                table, kept = self._read_group(group, mine, window)
                tables.append(table)
                shards.append(group_shards[kept])
            self._on_progress()
        if not tables:
            tables, shards = [self._schema_of_reads().empty_table()], [np.empty(0, np.int64)]
        return self._gather(pa.concat_tables(tables), np.concatenate(shards))

    def _read_group(
        self, group: int, mine: NDArray[np.bool_], window: TimeWindow
    ) -> tuple[pa.Table, NDArray[np.bool_]]:
        table = self._file.read_row_group(group, columns=self._names, use_threads=False)
        times = table[self._columns.event_time]
        inside = pc.and_(
            pc.greater_equal(times, pa.scalar(window.start, times.type)),
            pc.less(times, pa.scalar(window.end, times.type)),
        )
        kept = mine & pc.fill_null(inside, False).to_numpy(zero_copy_only=False)
        return table.filter(pa.array(kept)), kept

    def _gather(self, table: pa.Table, shards: Int64Array) -> ShardRows:
        frame = table.unify_dictionaries().to_pandas()
        labels = self._labels(frame)
        codes, numeric = self._columns.model_inputs(frame)
        order = np.argsort(shards, kind="stable")
        counts = np.bincount(shards, minlength=self._num_shards)
        return ShardRows(
            codes=codes[order],
            numeric=numeric[order],
            labels=labels[order],
            sizes={s: int(counts[s]) for s in range(self._rank, self._num_shards, self._num_ranks)},
            category_counts={name: _count(frame[name]) for name in self._columns.categorical},
        )

    def _labels(self, frame: pd.DataFrame) -> Float32Array:
        labels = frame[self._columns.label].to_numpy(dtype=np.float32, na_value=np.nan)
        wrong = ~np.isin(labels, (0.0, 1.0))
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise DataContractError(
                f"{int(wrong.sum())} of {len(labels)} rows have a label that is neither 0 nor 1; "
                f"the first is {labels[first]:g} in column {self._columns.label!r}, where "
                f"{self._columns.row_id} is {frame[self._columns.row_id].iloc[first]}. Leave "
                "unlabelled rows out of the snapshot"
            )
        return labels

    def _may_overlap(self, group: int, window: TimeWindow) -> bool:
        """False where the row group's statistics rule out that any row lies in the window."""
        position = self._file.schema_arrow.get_field_index(self._columns.event_time)
        statistics = self._file.metadata.row_group(group).column(position).statistics
        if statistics is None or not statistics.has_min_max:
            return True
        return bool(statistics.max >= window.start and statistics.min < window.end)

    @property
    def _names(self) -> list[str]:
        c = self._columns
        return [c.row_id, c.event_time, c.label, *c.categorical, *c.numeric]

    def _schema_of_reads(self) -> pa.Schema:
        return pa.schema([self._file.schema_arrow.field(name) for name in self._names])

    def _check_types(self, schema: pa.Schema) -> None:
        missing = [name for name in self._names if name not in schema.names]
        if missing:
            raise DataContractError(
                f"the snapshot lacks column(s) {', '.join(missing)}; it has {len(schema.names)} "
                "columns. Build it again with the feature service that names them"
            )
        if not self._columns.categorical and not self._columns.numeric:
            raise DataContractError("the snapshot's schema names no feature; nothing can be learnt")
        times = schema.field(self._columns.event_time).type
        if not pa.types.is_timestamp(times) or times.tz is None:
            raise DataContractError(
                f"column {self._columns.event_time!r} is {times}; expected a timestamp with a time "
                "zone. Build the snapshot again with times in UTC"
            )
        for name in (self._columns.label, *self._columns.numeric):
            if not _is_number(schema.field(name).type):
                raise DataContractError(
                    f"column {name!r} is {schema.field(name).type}; expected a number. Mend the "
                    "feature definitions and build the snapshot again"
                )


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _count(values: pd.Series) -> dict[str, int]:
    """Rows of each non-missing category; an empty string is missing."""
    counts = Counter({str(name): int(n) for name, n in values.value_counts().items() if n > 0})
    del counts[""]
    return dict(counts)


def deal_blocks(group_rows: list[int], num_shards: int) -> list[Int64Array]:
    """Shard of every row of every row group.

    Args:
        group_rows: rows of each row group.
        num_shards: virtual shards V.

    Returns:
        For each row group an int64 array of its rows' shards. Blocks are dealt in turn; a block is
        a whole row group, or an equal part of one that would make the shards uneven.
    """
    largest = max(1, sum(group_rows) // (num_shards * BLOCKS_PER_SHARD))
    owners, dealt = [], 0
    for rows in group_rows:
        num_blocks = max(1, -(-rows // largest))
        blocks = np.arange(rows) * num_blocks // max(rows, 1)
        owners.append((dealt + blocks) % num_shards)
        dealt += num_blocks
    return owners


class EpochSampler:
    """Batches of one rank: in every step equally many rows of each of its shards.

    Args:
        rows: the rank's training rows.
        rows_per_shard: rows of each shard in one step.
        num_steps: steps of an epoch, the same on all ranks.
        seed: with the epoch and the shard it decides a shard's order.
    """

    def __init__(self, rows: ShardRows, rows_per_shard: int, num_steps: int, seed: int) -> None:
        self._slices = list(rows.shard_slices())
        self._rows_per_shard = rows_per_shard
        self._num_steps = num_steps
        self._seed = seed

    def batches(self, epoch: int) -> Iterator[Int64Array]:
        """Row positions of each step; in every epoch another few rows of larger shards rest."""
        orders = [
            part.start
            + np.random.default_rng((self._seed, epoch, shard)).permutation(part.stop - part.start)
            for shard, part in self._slices
        ]
        for step in range(self._num_steps):
            taken = slice(step * self._rows_per_shard, (step + 1) * self._rows_per_shard)
            yield np.concatenate([order[taken] for order in orders])


def sample_rows(rows: ShardRows, rows_per_shard: int, seed: int) -> Int64Array:
    """Positions of at most `rows_per_shard` random rows of each shard, the same for any world."""
    chosen = [np.empty(0, dtype=np.int64)]
    for shard, part in rows.shard_slices():
        size = part.stop - part.start
        generator = np.random.default_rng((seed, shard))
        picked = generator.choice(size, min(size, rows_per_shard), replace=False)
        chosen.append(part.start + np.sort(picked))
    return np.concatenate(chosen)
