"""Decoding a snapshot: Parquet row groups into rows of 32-bit words, grouped by virtual shard.

A row is `RowLayout.width` words: its numbers (float32), its category codes (int32), a teacher's
output where there is one (float32), its label (float32). Rows of one width can lie in memory or in
a file alike, and any range of them can be read without the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, category_code
from tasks.kernel.errors import DataContractError
from tasks.kernel.parts import PartialCopy
from tasks.training.data.preprocess import Float32Array, Int32Array, Int64Array

# With row groups at most this share of a shard, each is one block and is read by one rank alone.
# Larger ones are cut, so that shards stay even; their ranks read them and keep their own rows.
BLOCKS_PER_SHARD = 16
# Rows that are decoded at a time, however large a row group is.
DECODED_ROWS = 1 << 16
# Column of a teacher's outputs in a snapshot that was written for one training.
TEACHER_OUTPUT = "teacher output"


@dataclass(frozen=True)
class RowLayout:
    """Where the columns lie in a row of 32-bit words."""

    num_numeric: int
    num_categorical: int
    is_distilled: bool = False
    """Whether a row has the output of a teacher."""

    @property
    def width(self) -> int:
        """Words of one row."""
        return self.num_numeric + self.num_categorical + self.is_distilled + 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return 4 * self.width

    def numeric(self, words: Int32Array) -> Float32Array:
        """Numbers of some rows, float32 (rows, numeric columns): a view."""
        return words.view(np.float32)[:, : self.num_numeric]

    def codes(self, words: Int32Array) -> Int32Array:
        """Category codes of some rows, int32 (rows, categorical columns): a view."""
        return words[:, self.num_numeric : self.num_numeric + self.num_categorical]

    def labels(self, words: Int32Array) -> Float32Array:
        """Labels of some rows, float32 (rows,): a view."""
        return words.view(np.float32)[:, -1]

    def targets(self, words: Int32Array) -> Float32Array:
        """What is learnt: labels, or (teacher output, label) in two columns; float32: a view."""
        return words.view(np.float32)[:, -2:] if self.is_distilled else self.labels(words)


@dataclass
class RowFacts:
    """What fitting and planning need to know of all rows of a shard; adds up over shards.

    Args:
        num_rows: rows.
        label_mean: mean of the labels.
        label_squares: squared distances from it, summed.
        category_counts: per categorical column, rows of each category that is not missing.
        num_missing: per numeric column, rows without a value.
    """

    num_rows: int = 0
    label_mean: float = 0.0
    label_squares: float = 0.0
    category_counts: dict[str, Counter[str]] = field(default_factory=dict)
    num_missing: list[int] = field(default_factory=list)

    @classmethod
    def none_of(cls, columns: DatasetSchema) -> RowFacts:
        """Facts of no rows."""
        counts: dict[str, Counter[str]] = {name: Counter() for name in columns.categorical}
        return cls(category_counts=counts, num_missing=[0] * len(columns.numeric))

    def add(self, other: RowFacts) -> None:
        """Count another shard's rows too (Chan, Golub and LeVeque, 1979)."""
        gap, share = other.label_mean - self.label_mean, 0.0
        if other.num_rows:
            share = other.num_rows / (self.num_rows + other.num_rows)
        self.label_mean += gap * share
        self.label_squares += other.label_squares + gap**2 * share * self.num_rows
        self.num_rows += other.num_rows
        self.num_missing = [a + b for a, b in zip(self.num_missing, other.num_missing, strict=True)]
        for name, counts in other.category_counts.items():
            self.category_counts[name].update(counts)


@dataclass(frozen=True)
class Column:
    """One categorical column of some rows: each row's place in `names`; missing is the last place.

    Args:
        names: the categories, then the empty string for missing.
        codes: `category_code` of each name.
        places: of each row.
    """

    names: list[str]
    codes: Int32Array
    places: Int64Array

    @classmethod
    def of(cls, values: pa.Array) -> Column:
        """Look up each category's code once, whatever the number of rows."""
        if not pa.types.is_dictionary(values.type):
            values = values.dictionary_encode()
        names = ["" if name is None else str(name) for name in values.dictionary.to_pylist()] + [""]
        places = pc.fill_null(values.indices.cast(pa.int64()), len(names) - 1)
        codes = np.array([category_code(name) for name in names], dtype=np.int32)
        return cls(names, codes, places.to_numpy(zero_copy_only=False))

    def counts(self, kept: Int64Array) -> Counter[str]:
        """Rows of each category among the rows `kept`; an empty string is missing, hence none."""
        of_place = np.bincount(self.places[kept], minlength=len(self.names))
        counted = zip(self.names, of_place.tolist(), strict=True)
        return Counter({name: count for name, count in counted if name and count})


@dataclass(frozen=True)
class DealtGroup:
    """One row group, cut into equal blocks that are dealt to the shards in turn.

    Args:
        num_rows: rows of the row group.
        num_blocks: blocks that it is cut into.
        first_block: blocks of the row groups before it.
        num_shards: virtual shards V.
    """

    num_rows: int
    num_blocks: int
    first_block: int
    num_shards: int

    def shards(self) -> set[int]:
        """Shards that have rows of the group."""
        blocks = range(min(self.num_blocks, self.num_shards))
        return {(self.first_block + block) % self.num_shards for block in blocks}

    def owners(self) -> Int64Array:
        """Shard of every row."""
        blocks = np.arange(self.num_rows) * self.num_blocks // max(self.num_rows, 1)
        return (self.first_block + blocks) % self.num_shards


@dataclass(eq=False)
class SnapshotFile:
    """A snapshot, and the decoding of it.

    Args:
        path: the snapshot, Parquet.
        columns: which column is what.
        num_shards: virtual shards V.
        is_distilled: whether the snapshot has the outputs of a teacher, in column `TEACHER_OUTPUT`.
        partial: brings what is read of it; None: the file is whole.

    Raises:
        DataContractError: the file is no Parquet, or a column is missing or of a wrong type.
        ArtifactError, TransientError, StorageError: as `PartialCopy.bring`.
    """

    path: Path
    columns: DatasetSchema
    num_shards: int
    is_distilled: bool = False
    partial: PartialCopy | None = None

    def __post_init__(self) -> None:
        columns = self.columns
        self.layout = RowLayout(len(columns.numeric), len(columns.categorical), self.is_distilled)
        if self.partial:
            self.partial.bring(-1)
        try:
            # Dictionary columns: a category's text is decoded once, not once a row.
            self._file = pq.ParquetFile(self.path, read_dictionary=list(columns.categorical))
        except (pa.ArrowInvalid, OSError) as exc:
            raise DataContractError(
                f"snapshot {self.path.name} cannot be read as Parquet ({exc}); build it again"
            ) from exc
        check_types(self._file.schema_arrow, columns)

    @property
    def identity(self) -> tuple[object, ...]:
        """Another one for other content."""
        if self.partial:
            return (self.partial.sha256,)
        file = self.path.stat()
        return str(self.path), file.st_size, file.st_mtime_ns

    @property
    def num_groups(self) -> int:
        """Row groups of the file."""
        return int(self._file.num_row_groups)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def groups(self, window: TimeWindow) -> dict[int, DealtGroup]:
        """The row groups that may have rows in the window, by their numbers."""
        groups = [g for g in range(self.num_groups) if self._may_overlap(g, window)]
        rows = [self._file.metadata.row_group(g).num_rows for g in groups]
        return dict(zip(groups, deal_blocks(rows, self.num_shards), strict=True))

    def decode(
        self, group: int, dealt: DealtGroup, shards: Sequence[int], window: TimeWindow
    ) -> Iterator[tuple[int, Int32Array, RowFacts]]:
        """Rows of one row group that lie in the window, for some shards, in their order.

        Args:
            group: the row group's number.
            dealt: which of its rows belong to which shard.
            shards: whose rows are wanted.
            window: event times outside it are left out.

        Yields:
            A shard, its next rows as words, int32 (rows, width), and facts about them. A large row
            group comes in several parts.

        Raises:
            DataContractError: the row group is damaged, or a label is none of the task's.
            ArtifactError, TransientError, StorageError: as `PartialCopy.bring`.
        """
        if dealt.shards().isdisjoint(shards):
            return
        if self.partial:
            self.partial.bring(group)
        owners, begin = dealt.owners(), 0
        for table in self._tables(group):
            part = owners[begin : begin + table.num_rows]
            kept = np.isin(part, shards) & inside(table.column(self.columns.event_time), window)
            if kept.any():
                yield from self._shards_of(table, part, np.flatnonzero(kept), group, begin)
            begin += table.num_rows

    def _tables(self, group: int) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._file.iter_batches(
                batch_size=DECODED_ROWS, row_groups=[group], columns=self._names, use_threads=False
            )
        except (pa.ArrowException, OSError) as exc:
            raise DataContractError(
                f"row group {group} of {self.num_groups} of snapshot {self.path.name} cannot be "
                f"read ({exc}); the file was cut or changed. Build the snapshot again"
            ) from exc

    def _shards_of(
        self, table: pa.RecordBatch, owners: Int64Array, kept: Int64Array, group: int, begin: int
    ) -> Iterator[tuple[int, Int32Array, RowFacts]]:
        words = np.empty((table.num_rows, self.layout.width), dtype=np.int32)
        numeric, codes = self.layout.numeric(words), self.layout.codes(words)
        for position, name in enumerate(self.columns.numeric):
            numeric[:, position] = _numbers(table.column(name))
        categories = [Column.of(table.column(name)) for name in self.columns.categorical]
        for position, column in enumerate(categories):
            codes[:, position] = column.codes[column.places]
        self.layout.labels(words)[:] = _numbers(table.column(self.columns.label))
        self._check_labels(self.layout.labels(words), kept, group, begin)
        if self.layout.is_distilled:
            self.layout.targets(words)[:, 0] = _numbers(table.column(TEACHER_OUTPUT))
        for shard in np.unique(owners[kept]).tolist():
            rows = kept[owners[kept] == shard]
            yield shard, words[rows], self._facts(words, categories, rows)

    def _facts(self, words: Int32Array, categories: list[Column], rows: Int64Array) -> RowFacts:
        names = self.columns.categorical
        labels = self.layout.labels(words)[rows].astype(np.float64)
        return RowFacts(
            num_rows=len(rows),
            label_mean=float(labels.mean()),
            label_squares=float(((labels - labels.mean()) ** 2).sum()),
            category_counts={
                name: column.counts(rows) for name, column in zip(names, categories, strict=True)
            },
            num_missing=np.isnan(self.layout.numeric(words)[rows]).sum(axis=0).tolist(),
        )

    def _check_labels(self, labels: Float32Array, kept: Int64Array, group: int, begin: int) -> None:
        wanted = range(self.columns.num_labels)
        fits = np.isfinite(labels[kept]) if self._is_number else np.isin(labels[kept], wanted)
        wrong = kept[~fits]
        if len(wrong):
            # Ids are decoded for this sentence alone: they are the largest column.
            name = self.columns.row_id
            ids = self._file.read_row_group(group, columns=[name], use_threads=False).column(name)
            raise DataContractError(
                f"{len(wrong)} of {len(kept)} rows have a label that is "
                f"{'no number' if self._is_number else f'not among 0 to {wanted[-1]}'}; the first "
                f"is {labels[wrong[0]]:g} in column {self.columns.label!r}, where {name} is "
                f"{ids[begin + int(wrong[0])].as_py()}. Leave unlabelled rows out of the snapshot"
            )

    @property
    def _is_number(self) -> bool:
        return self.columns.task == "regression"

    def _may_overlap(self, group: int, window: TimeWindow) -> bool:
        """False where the row group's statistics rule out that any row is in the window."""
        position = self._file.schema_arrow.get_field_index(self.columns.event_time)
        statistics = self._file.metadata.row_group(group).column(position).statistics
        if statistics is None or not statistics.has_min_max:
            return True
        return bool(statistics.max >= window.start and statistics.min < window.end)

    @property
    def _names(self) -> list[str]:
        c = self.columns
        teacher = [TEACHER_OUTPUT] if self.layout.is_distilled else []
        return [c.event_time, c.label, *teacher, *c.categorical, *c.numeric]


def check_types(schema: pa.Schema, columns: DatasetSchema) -> None:
    """Refuse a file that cannot be what `columns` describes.

    Raises:
        DataContractError: a column is missing or of a wrong type, or none is a feature.
    """
    features = (*columns.categorical, *columns.numeric)
    names = (columns.row_id, columns.event_time, columns.label, *features)
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise DataContractError(
            f"the snapshot lacks column(s) {', '.join(missing)}; it has {len(schema.names)} "
            "columns. Build it again with the feature service that names them"
        )
    if not features:
        raise DataContractError("the snapshot's schema names no feature; nothing can be learnt")
    times = schema.field(columns.event_time).type
    if not pa.types.is_timestamp(times) or times.tz is None:
        raise DataContractError(
            f"column {columns.event_time!r} is {times}; expected a timestamp with a time "
            "zone. Build the snapshot again with times in UTC"
        )
    for name in (columns.label, *columns.numeric):
        if not _is_number(schema.field(name).type):
            raise DataContractError(
                f"column {name!r} is {schema.field(name).type}; expected a number. Mend the "
                "feature definitions and build the snapshot again"
            )


def inside(times: pa.Array | pa.ChunkedArray, window: TimeWindow) -> NDArray[np.bool_]:
    """Which of some event times lie in a window; none is outside."""
    found = pc.and_(pc.greater_equal(times, window.start), pc.less(times, window.end))
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def deal_blocks(group_rows: Sequence[int], num_shards: int) -> list[DealtGroup]:
    """Deal the rows of a snapshot's row groups to the shards.

    Args:
        group_rows: rows of each row group.
        num_shards: virtual shards V.

    Returns:
        One for each row group. Blocks are dealt in turn; a block is a whole row group, or an equal
        part of one that would make the shards uneven.
    """
    largest = max(1, sum(group_rows) // (num_shards * BLOCKS_PER_SHARD))
    groups, dealt = [], 0
    for rows in group_rows:
        num_blocks = max(1, -(-rows // largest))
        groups.append(DealtGroup(rows, num_blocks, dealt, num_shards))
        dealt += num_blocks
    return groups


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _numbers(values: pa.Array) -> Float32Array:
    """Float32 values; null is NaN."""
    numbers: Float32Array = values.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    return numbers
