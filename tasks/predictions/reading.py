"""Reading the prediction log: a window of one model, a bounded number of rows in memory."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError, DataContractError, refused_writes_explained
from tasks.predictions.parts import locked, visible_parts
from tasks.predictions.schema import (
    ERROR,
    EVENT_TIME,
    FIXED,
    SCORES,
    SUBJECT,
    TRACK,
    VARIANT,
    VERSION,
    day_of,
    in_order,
    logged_models,
    model_folder,
    typed,
)
from tasks.predictions.upkeep import damaged, fitted

logger = logging.getLogger(__name__)

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class LogQuery:
    """Which rows of the log are wanted.

    Attributes:
        model: registered model.
        window: moments of arrival, UTC; None for all that is kept.
        versions, variants, tracks: any of these; None for all.
        subject: as it is written (see `masking` where it is masked).
        answered: rows with an answer, refused requests, or, with None, both.
    """

    model: str
    window: TimeWindow | None = None
    versions: Sequence[str] | None = None
    variants: Sequence[str] | None = None
    tracks: Sequence[str] | None = None
    subject: str | None = None
    answered: bool | None = True


@dataclass
class ReadTally:
    """What a reading met; complete when the reading has ended.

    Attributes:
        parts: files that were opened.
        damaged: a sentence for each part that could not be read to its end.
        absent: wanted columns that some part lacks, or holds under another type, with rows.
    """

    parts: int = 0
    rows: int = 0
    damaged: list[str] = field(default_factory=list)
    absent: Counter[str] = field(default_factory=Counter)


def read_rows(
    home: Path,
    query: LogQuery,
    columns: Sequence[str] | None = None,
    *,
    batch_rows: int = BATCH_ROWS,
    tally: ReadTally | None = None,
) -> Iterator[pa.Table]:
    """Rows of the log, day by day and part by part; within a part in the order of their writing.

    Parts outside the window and row groups without a wanted row are not read. While it is read, a
    model's folder is not merged. A damaged part is skipped from where it cannot be read, told of in
    `tally.damaged` and in the log; it is never half a row.

    Args:
        home: state folder.
        query: rows.
        columns: wanted, in this order; a part that lacks one gives nulls. None for all of them.
        batch_rows: at most so many rows a table.
        tally: is filled as rows are read.

    Raises:
        DataContractError: no part has a column that was asked for, and the log is not empty.
    """
    tally = tally if tally is not None else ReadTally()
    folder = model_folder(home, query.model)
    with ExitStack() as stack:
        stack.enter_context(locked(folder, exclusive=False))
        parts = list(_parts(folder, query.window))
        schema = _schema(parts, columns, tally)
        _check_known(query, columns, schema, parts)
        for part in parts:
            yield from _read_part(part, query, schema, batch_rows, tally)


def read_table(
    home: Path,
    query: LogQuery,
    columns: Sequence[str] | None = None,
    *,
    max_rows: int,
    tally: ReadTally | None = None,
) -> pa.Table:
    """As `read_rows`, in one table.

    Raises:
        DataContractError: more than `max_rows` rows, or an unknown column.
    """
    tables, rows = [], 0
    for table in read_rows(home, query, columns, tally=tally):
        rows += table.num_rows
        if rows > max_rows:
            raise DataContractError(
                f"the log of {query.model} has more than {max_rows:,} rows in {query.window}; "
                "expected at most so many in memory. Choose a shorter window. Nothing was made"
            )
        tables.append(table)
    if tables:
        return pa.concat_tables(tables, promote_options="default")
    names = list(columns) if columns is not None else FIXED.names
    return pa.schema([pa.field(name, typed(name) or pa.null()) for name in names]).empty_table()


def count_rows(home: Path, query: LogQuery, tally: ReadTally | None = None) -> int:
    """How many rows there are."""
    return sum(table.num_rows for table in read_rows(home, query, [EVENT_TIME], tally=tally))


@dataclass(frozen=True)
class LogCount:
    """Rows of one version, variant and track."""

    model: str
    version: str
    variant: str
    track: str
    answered: int
    refused: int
    first: datetime
    last: datetime


def count_by_version(
    home: Path, model: str | None, window: TimeWindow | None, tally: ReadTally | None = None
) -> list[LogCount]:
    """Rows by model, version, variant and track, in this order."""
    found: dict[tuple[str, str, str, str], list[Any]] = {}
    for name in [model] if model else logged_models(home):
        query = LogQuery(name, window, answered=None)
        wanted = [VERSION, VARIANT, TRACK, ERROR, EVENT_TIME]
        for table in read_rows(home, query, wanted, tally=tally):
            _count(table, name, found)
    return [LogCount(*key, *counts) for key, counts in sorted(found.items())]


def _count(table: pa.Table, model: str, found: dict[tuple[str, str, str, str], list[Any]]) -> None:
    grouped = table.append_column("refused", pc.is_valid(table.column(ERROR)).cast(pa.int64()))
    grouped = grouped.group_by([VERSION, VARIANT, TRACK]).aggregate(
        [("refused", "sum"), ("refused", "count"), (EVENT_TIME, "min"), (EVENT_TIME, "max")]
    )
    for row in grouped.to_pylist():
        key = (model, row[VERSION] or "", row[VARIANT] or "", row[TRACK] or "")
        refused = row["refused_sum"]
        first, last = row[f"{EVENT_TIME}_min"], row[f"{EVENT_TIME}_max"]
        answered = row["refused_count"] - refused
        seen = found.setdefault(key, [0, 0, first, last])
        found[key] = [
            *(seen[0] + answered, seen[1] + refused),
            *(min(seen[2], first), max(seen[3], last)),
        ]


def logged_columns(home: Path, model: str, window: TimeWindow | None = None) -> pa.Schema:
    """All columns that a model's parts have, with their types."""
    folder = model_folder(home, model)
    with locked(folder, exclusive=False):
        return _schema(list(_parts(folder, window)), None, ReadTally())


def logged_parts(home: Path, model: str, window: TimeWindow | None = None) -> list[Path]:
    """Parts that have rows of these days."""
    return list(_parts(model_folder(home, model), window))


def _parts(folder: Path, window: TimeWindow | None) -> Iterator[Path]:
    for day_folder in sorted(folder.glob("day=*")):
        day = day_of(day_folder)
        if day is not None and (window is None or _meets(day, window)):
            yield from visible_parts(day_folder)


def _meets(day: date, window: TimeWindow) -> bool:
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return start < window.end and window.start < start + timedelta(days=1)


def _schema(parts: Sequence[Path], columns: Sequence[str] | None, tally: ReadTally) -> pa.Schema:
    """The wanted columns with their types; of two types the newest part's."""
    types: dict[str, pa.DataType] = {f.name: f.type for f in FIXED}
    for part in parts:
        present = _schema_of(part)
        if present is not None:
            types.update({f.name: typed(f.name) or f.type for f in present})
    if columns is None:
        return pa.schema([(name, types[name]) for name in in_order(types)])
    return pa.schema([(name, types.get(name) or typed(name) or pa.null()) for name in columns])


def _schema_of(part: Path) -> pa.Schema | None:
    try:
        return ds.dataset(part, format="parquet").schema
    except (OSError, pa.ArrowException):
        return None  # reading it will tell


def _check_known(
    query: LogQuery, columns: Sequence[str] | None, schema: pa.Schema, parts: Sequence[Path]
) -> None:
    unknown = [f.name for f in schema if pa.types.is_null(f.type)] if columns and parts else []
    if unknown:
        raise DataContractError(
            f"no part of the log of {query.model} has {', '.join(unknown)}; expected such as "
            f"{FIXED.names[0]}, or f:<feature>, e:<key>, age_s:<view>, state:<view>. Was the field "
            "left out by configuration? Nothing was read"
        )


def _read_part(
    part: Path, query: LogQuery, schema: pa.Schema, batch_rows: int, tally: ReadTally
) -> Iterator[pa.Table]:
    try:
        options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        data = ds.dataset(part, format=ds.ParquetFileFormat(default_fragment_scan_options=options))
        present = [f.name for f in schema if f.name in data.schema.names]
        scanner = data.scanner(
            columns=present,
            filter=_filter(query, data.schema.names),
            batch_size=batch_rows,
            batch_readahead=1,
            use_threads=False,
        )
        tally.parts += 1
        for batch in scanner.to_batches():
            if batch.num_rows:
                tally.rows += batch.num_rows
                yield _typed(pa.Table.from_batches([batch]), schema, tally)
    except (OSError, pa.ArrowException) as exc:
        sentence = damaged(part, exc)
        logger.error("%s", sentence)
        tally.damaged.append(sentence)


def _typed(table: pa.Table, schema: pa.Schema, tally: ReadTally) -> pa.Table:
    """A table with exactly these columns; one of another type, as a masked one, is null."""
    for wanted in schema:
        if wanted.name not in table.schema.names:
            tally.absent[wanted.name] += table.num_rows
        elif table.schema.field(wanted.name).type != wanted.type:
            tally.absent[wanted.name] += table.num_rows
            table = table.drop_columns([wanted.name])
    return fitted(table, schema)


def _filter(query: LogQuery, present: Sequence[str]) -> ds.Expression | None:
    terms: list[ds.Expression] = []
    if query.window is not None:
        moment = ds.field(EVENT_TIME)
        terms += [moment >= query.window.start, moment < query.window.end]
    named = ((VERSION, query.versions), (VARIANT, query.variants), (TRACK, query.tracks))
    for name, wanted in named:
        if wanted is not None:
            terms.append(ds.field(name).isin(list(wanted)))
    if query.subject is not None:
        terms.append(ds.field(SUBJECT) == query.subject)
    if query.answered is not None and ERROR in present:
        refused = ds.field(ERROR).is_valid()
        terms.append(~refused if query.answered else refused)
    whole = None
    for term in terms:
        whole = term if whole is None else whole & term
    return whole


ENDINGS = (".parquet", ".csv")
PRIVATE_FILE = 0o600
"""Whoever exports says by moving or opening the file who else may read what people sent."""


def write_window(tables: Iterator[pa.Table], schema: pa.Schema, target: Path) -> int:
    """Write rows as Parquet or CSV, by the name's ending, aside and then renamed; how many.

    Its owner alone can read it, as the log itself.

    CSV has no lists, so the column `scores` is not in it.

    Raises:
        ConfigurationError: the name ends in another way.
        StorageError: the disk refused a write.
    """
    if target.suffix not in ENDINGS:
        raise ConfigurationError(
            f"{target} ends in {target.suffix or 'nothing'}; expected {' or '.join(ENDINGS)}. "
            "Nothing was written"
        )
    names = [n for n in schema.names if target.suffix != ".csv" or n != SCORES]
    schema = pa.schema([schema.field(name) for name in names])
    aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    rows = 0
    with refused_writes_explained(target):
        try:
            aside.touch(PRIVATE_FILE)
            with _opened(aside, target.suffix, schema) as writer:
                for table in tables:
                    writer.write_table(table.select(names))
                    rows += table.num_rows
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    return rows


def _opened(file: Path, ending: str, schema: pa.Schema) -> Any:
    if ending == ".csv":
        return pa_csv.CSVWriter(file, schema)
    return pq.ParquetWriter(file, schema, compression="zstd")
