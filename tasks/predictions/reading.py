"""Reading the prediction log: a window of one model, a bounded number of rows in memory."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.files import replacing
from tasks.kernel.settings import children
from tasks.predictions import schema as log
from tasks.predictions.segments import folder_held, visible_segments
from tasks.predictions.upkeep import damaged, fitted

logger = logging.getLogger(__name__)

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class LogQuery:
    """Which rows of the log are wanted.

    Attributes:
        model: registered model.
        window: moments of arrival, UTC; None for all that is kept.
        versions, tracks: any of these; None for all.
        answered: rows with an answer, refused requests, or, with None, both.
    """

    model: str
    window: TimeWindow | None = None
    versions: Sequence[str] | None = None
    tracks: Sequence[str] | None = None
    answered: bool | None = True


@dataclass
class ReadTally:
    """What a reading met; complete when the reading has ended.

    Attributes:
        parts: segments that were opened.
        damaged: a sentence for each segment that could not be read to its end.
    """

    parts: int = 0
    damaged: list[str] = field(default_factory=list)


def read_rows(
    home: Path,
    query: LogQuery,
    columns: Sequence[str] | None = None,
    *,
    tally: ReadTally | None = None,
) -> Iterator[pa.Table]:
    """Rows of the log, day by day and segment by segment, in the order of their writing.

    Segments outside the window and row groups without a wanted row are not read. While it is read,
    a model's folder is not merged. A damaged segment is skipped from where it cannot be read, named
    in `tally.damaged` and logged; it is never half a row.

    Args:
        home: state folder.
        query: rows.
        columns: wanted, in this order; a segment that lacks one gives nulls. None for all of them.
        tally: is filled as rows are read.

    Raises:
        DataContractError: no segment has a column that was asked for, and the log is not empty.
    """
    with folder_held(log.model_folder(home, query.model), exclusive=False):
        segments = logged_segments(home, query.model, query.window)
        schema = _schema(segments, columns)
        _check_known(query, columns, schema, segments)
        for segment in segments:
            yield from _read_segment(segment, query, schema, tally or ReadTally())


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
    keys = [log.VERSION, log.VARIANT, log.TRACK]
    each = [
        (log.EVENT_TIME, "count"),
        (log.EVENT_TIME, "min"),
        (log.EVENT_TIME, "max"),
        (log.ERROR, "count"),
    ]
    whole = {f"{name}_{what}": "sum" if what == "count" else what for name, what in each}
    found: list[LogCount] = []
    for name in [model] if model else log.logged_models(home):
        query = LogQuery(name, window, answered=None)
        counted = [
            table.group_by(keys).aggregate(each).to_pandas()
            for table in read_rows(home, query, [*keys, log.EVENT_TIME, log.ERROR], tally=tally)
        ]
        if counted:
            parts = pd.concat(counted).fillna(dict.fromkeys(keys, ""))
            summed = parts.groupby(keys, as_index=False).agg(whole)
            for version, variant, track, rows, first, last, refused in summed.to_numpy().tolist():
                of = (name, version, variant, track)
                found.append(LogCount(*of, rows - refused, refused, first, last))
    return found


def logged_columns(home: Path, model: str, window: TimeWindow | None = None) -> pa.Schema:
    """All columns that a model's segments have, with their types."""
    with folder_held(log.model_folder(home, model), exclusive=False):
        return _schema(logged_segments(home, model, window), None)


def logged_segments(home: Path, model: str, window: TimeWindow | None = None) -> list[Path]:
    """Segments that have rows of these days."""
    days = [(log.day_of(folder), folder) for folder in children(log.model_folder(home, model))]
    return [
        segment
        for day, folder in days
        if day is not None and (window is None or _meets(day, window))
        for segment in visible_segments(folder)
    ]


def _meets(day: date, window: TimeWindow) -> bool:
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return start < window.end and window.start < start + timedelta(days=1)


def _schema(segments: Sequence[Path], columns: Sequence[str] | None) -> pa.Schema:
    """The wanted columns with their types; of two types the newest segment's."""
    types: dict[str, pa.DataType] = {f.name: f.type for f in log.FIXED}
    for segment in segments:
        try:
            present = ds.dataset(segment, format="parquet").schema
        except (OSError, pa.ArrowException):
            continue  # reading it reports it
        types.update({f.name: log.typed(f.name) or f.type for f in present})
    if columns is None:
        return pa.schema([(name, types[name]) for name in log.in_order(types)])
    return pa.schema([(name, types.get(name) or log.typed(name) or pa.null()) for name in columns])


def _check_known(
    query: LogQuery, columns: Sequence[str] | None, schema: pa.Schema, segments: Sequence[Path]
) -> None:
    unknown = [f.name for f in schema if pa.types.is_null(f.type)] if columns and segments else []
    if unknown:
        raise DataContractError(
            f"the log of {query.model} has no column {', '.join(unknown)}; expected such as "
            f"{log.FIXED.names[0]}, or f:<feature>, e:<key>, age_s:<view>, state:<view>. Was the "
            "field left out by configuration? Nothing was read"
        )


def _read_segment(
    segment: Path, query: LogQuery, schema: pa.Schema, tally: ReadTally
) -> Iterator[pa.Table]:
    """Rows with exactly these columns; one of another type, as a masked one, is null."""
    try:
        options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        format_ = ds.ParquetFileFormat(default_fragment_scan_options=options)
        data = ds.dataset(segment, format=format_)
        scanner = data.scanner(
            columns=[f.name for f in schema if f.name in data.schema.names],
            filter=_filter(query, data.schema.names),
            batch_size=BATCH_ROWS,
            batch_readahead=1,
            use_threads=False,
        )
        tally.parts += 1
        for batch in scanner.to_batches():
            if batch.num_rows:
                table = pa.Table.from_batches([batch])
                unlike = [f.name for f in table.schema if f.type != schema.field(f.name).type]
                yield fitted(table.drop_columns(unlike), schema)
    except (OSError, pa.ArrowException) as exc:
        sentence = damaged(segment, exc)
        logger.error("%s", sentence)
        tally.damaged.append(sentence)


def _filter(query: LogQuery, present: Sequence[str]) -> ds.Expression:
    wanted = pc.scalar(True)
    if query.window is not None:
        moment = ds.field(log.EVENT_TIME)
        wanted &= (moment >= query.window.start) & (moment < query.window.end)
    for name, values in ((log.VERSION, query.versions), (log.TRACK, query.tracks)):
        if values is not None:
            wanted &= ds.field(name).isin(list(values))
    if query.answered is not None and log.ERROR in present:
        refused = ds.field(log.ERROR).is_valid()
        wanted &= ~refused if query.answered else refused
    return wanted


def write_window(tables: Iterator[pa.Table], schema: pa.Schema, target: Path) -> int:
    """Write rows as Parquet or CSV, by the name's ending, aside and then renamed; how many.

    Its owner alone can read it, as the log itself.

    CSV has no lists, so the column `scores` is not in it.

    Raises:
        ConfigurationError: the name ends in another way.
        StorageError: the disk refused a write.
    """
    if target.suffix not in (".parquet", ".csv"):
        raise ConfigurationError(
            f"{target} ends in {target.suffix or 'nothing'}; expected .parquet or .csv. "
            "Nothing was written"
        )
    is_csv = target.suffix == ".csv"
    names = [n for n in schema.names if not (is_csv and n == log.SCORES)]
    schema = pa.schema([schema.field(name) for name in names])
    rows = 0
    # Whoever exports says by moving or opening the file who else may read what people sent.
    with replacing(target, private=True) as aside:
        with (
            pa_csv.CSVWriter(aside, schema)
            if is_csv
            else pq.ParquetWriter(aside, schema, compression="zstd")
        ) as writer:
            for table in tables:
                writer.write_table(table.select(names))
                rows += table.num_rows
    return rows
