"""Upkeep of the log: old days are removed, small parts become one, damage is set aside.

Any number of processes may do it; the one that holds a model's folder works, the others pass by.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.kernel.errors import StorageError
from tasks.kernel.files import private_folder, write_atomically
from tasks.predictions.config import PredictionLogConfig
from tasks.predictions.labels import BY_REQUEST, labels_folder
from tasks.predictions.parts import (
    ROW_GROUP_ROWS,
    PartWriter,
    locked,
    remove_replaced,
    replace_parts,
    visible_parts,
)
from tasks.predictions.schema import (
    PARTS,
    REQUEST_ID,
    SUBJECT,
    day_of,
    log_root,
    logged_models,
    mask_key_file,
    model_folder,
    open_mask,
)

logger = logging.getLogger(__name__)

COMPACT_PARTS = 120
"""Parts of the current day from which they are merged; those of a finished day always are."""
SETTLED_H = 1
"""A day is finished so long after its end: what arrived at midnight is written by then."""


def keep_up(
    home: Path,
    writer: PartWriter,
    config: PredictionLogConfig,
    now: datetime,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """See to every model's folder that nobody else holds.

    Each row is rewritten twice at most: when its part is one of many of its day, and when the day
    has ended.

    Args:
        home: state folder.
        writer: of this process.
        config: retention.
        now: the moment, UTC.
        stopping: asked between days; True ends the work there.

    Raises:
        StorageError: the disk refused; what was there is unchanged.
    """
    oldest = (now - timedelta(days=config.retention_days)).date()
    finished_before = (now - timedelta(hours=SETTLED_H)).date()
    for folder in sorted(log_root(home).glob("model=*")):
        with locked(folder, exclusive=True, wait=False) as held:
            if not held:
                continue
            for day_folder in sorted(folder.glob("day=*")):
                day = day_of(day_folder)
                if day is None:
                    continue
                if stopping():
                    return
                if day < oldest:
                    _remove(day_folder)
                    continue
                _keep_day(home, day_folder, writer, is_finished=day < finished_before)
    _remove_files(home, now - timedelta(days=config.retention_days))


def set_aside(home: Path, part: Path) -> Path:
    """Move a damaged part out of the log, where nobody reads it; its new place."""
    folder = private_folder(log_root(home) / "damaged")
    place = folder / f"{part.parent.parent.name}.{part.parent.name}.{part.name}"
    part.rename(place)
    return place


def damage_of(part: Path) -> str | None:
    """A sentence about a part that cannot be read; None where its rows and digests are whole."""
    try:
        with pq.ParquetFile(part, page_checksum_verification=True) as file:
            for number in range(file.num_row_groups):
                file.read_row_group(number, use_threads=False)
    except (OSError, pa.ArrowException) as exc:
        return damaged(part, exc)
    return None


def damaged(part: Path, exc: Exception) -> str:
    """The sentence about a damaged part."""
    return (
        f"{part} is damaged ({str(exc).splitlines()[0]}); expected a whole Parquet file. Its rows "
        "are left out and the next upkeep moves it to predictions/damaged; put it back from a copy"
    )


def merge_parts(writer: PartWriter, folder: Path, parts: Sequence[Path]) -> int:
    """Merge parts of a day whose columns agree in type; how many parts are left of them.

    To be called with the model's folder held alone.
    """
    left = 0
    for schema, some in _agreeing(parts):
        if len(some) > 1:
            replace_parts(writer, folder, some, _tables(some, schema), schema)
        left += 1
    return left


def _keep_day(home: Path, folder: Path, writer: PartWriter, *, is_finished: bool) -> None:
    remove_replaced(folder)
    parts, least = visible_parts(folder), 2
    if not is_finished:
        parts = [part for part in parts if part.name.startswith(PARTS)]
        least = COMPACT_PARTS
    if len(parts) < least:
        return
    whole = []
    for part in parts:
        sentence = damage_of(part)
        if sentence is None:
            whole.append(part)
        else:
            logger.error("%s", sentence)
            set_aside(home, part)
    if len(whole) > 1:
        merge_parts(writer, folder, whole)


def _remove(folder: Path) -> None:
    """Remove a day; renamed first, so that a kill never leaves a part of it in the log."""
    gone = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)
    logger.info("%s is older than the retention; removed", folder)


def _remove_files(home: Path, before: datetime) -> None:
    """Remove damaged parts and tables of labels that are older than the retention.

    Labels that came so long ago are of rows that are gone.
    """
    root = log_root(home)
    for file in (*root.glob("damaged/*.parquet"), *root.glob("labels/model=*/*.parquet")):
        try:
            if file.stat().st_mtime < before.timestamp():
                file.unlink()
        except FileNotFoundError:
            continue  # another process was first


def _agreeing(parts: Sequence[Path]) -> Iterator[tuple[pa.Schema, list[Path]]]:
    """Parts in groups that one schema fits: a field that was masked since has another type."""
    groups: list[tuple[pa.Schema, list[Path]]] = []
    for part in parts:
        schema = pq.read_schema(part).remove_metadata()
        for number, (common, some) in enumerate(groups):
            try:
                unified = pa.unify_schemas([common, schema])
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                continue
            groups[number] = (unified, [*some, part])
            break
        else:
            groups.append((schema, [part]))
    yield from groups


def _tables(parts: Sequence[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """Rows of all parts in tables of about a row group, at most two of them in memory."""
    waiting: list[pa.Table] = []
    rows = 0
    for part in parts:
        with pq.ParquetFile(part) as file:
            for number in range(file.num_row_groups):
                table = fitted(file.read_row_group(number, use_threads=False), schema)
                waiting.append(table)
                rows += table.num_rows
                if rows >= ROW_GROUP_ROWS:
                    yield pa.concat_tables(waiting)
                    waiting, rows = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of a schema, null where the table lacks one."""
    columns = [
        table.column(f.name) if f.name in table.schema.names else pa.nulls(table.num_rows, f.type)
        for f in schema
    ]
    return pa.table(columns, schema=schema)


@dataclass
class Erasure:
    """What an erasure did.

    Attributes:
        rows: of the subject, that are gone.
        parts: that were rewritten or removed.
        labels: of the subject's requests, that are gone.
        unread: sentences about parts that could not be looked through: damaged, or set aside.
    """

    rows: int = 0
    parts: int = 0
    labels: int = 0
    unread: list[str] = field(default_factory=list)


def erase_subject(home: Path, subject: str, model: str | None = None) -> Erasure:
    """Rewrite every part that has rows of a subject, as written openly or masked.

    A part is replaced whole, so a kill in between leaves it as it was or as it is to be; run again.
    Servers go on meanwhile: what they answered this subject in the last seconds may still be on its
    way to the disk.

    Args:
        home: state folder.
        subject: as the client is known to the server.
        model: of this model only; None for all.

    Raises:
        StorageError: the disk refused a write; parts done before stay done.
    """
    names = [subject]
    if mask_key_file(home).exists():
        names.append(open_mask(home).text(subject))
    erasure = Erasure()
    with PartWriter(home) as writer:
        for name in [model] if model is not None else logged_models(home):
            folder = model_folder(home, name)
            requests: set[str] = set()
            with locked(folder, exclusive=True):
                for day_folder in sorted(folder.glob("day=*")):
                    remove_replaced(day_folder)
                    for part in visible_parts(day_folder):
                        _erase_from(part, names, writer, requests, erasure)
            _erase_labels(labels_folder(home, name), requests, erasure)
    aside = sorted((log_root(home) / "damaged").glob("*.parquet"))
    erasure.unread += [
        f"{file} was set aside as damaged; look through it, or remove it" for file in aside
    ]
    return erasure


def _erase_from(
    part: Path, names: list[str], writer: PartWriter, requests: set[str], erasure: Erasure
) -> None:
    try:
        data = ds.dataset(part, format="parquet")
        theirs = data.to_table([REQUEST_ID], filter=ds.field(SUBJECT).isin(names))
        total = data.count_rows()
    except (OSError, pa.ArrowException) as exc:
        erasure.unread.append(damaged(part, exc))
        return
    if not theirs.num_rows:
        return
    if theirs.num_rows == total:
        part.unlink()
    else:
        schema = pq.read_schema(part).remove_metadata()
        replace_parts(writer, part.parent, [part], _others(part, names), schema)
    requests.update(theirs.column(0).to_pylist())
    erasure.rows += theirs.num_rows
    erasure.parts += 1


def _others(part: Path, names: list[str]) -> Iterator[pa.Table]:
    """The rows of everybody else, one row group at a time."""
    with pq.ParquetFile(part) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            theirs = pc.is_in(table.column(SUBJECT), value_set=pa.array(names))
            yield table.filter(pc.invert(theirs))


def _erase_labels(folder: Path, requests: set[str], erasure: Erasure) -> None:
    """Take the labels of requests out; a file's digest in its name stays that of what came."""
    if not requests:
        return
    ids = pa.array(sorted(requests))
    for file in sorted(folder.glob(f"{BY_REQUEST}-*.parquet")):
        try:
            table = pq.read_table(file)
        except (OSError, pa.ArrowException) as exc:
            raise StorageError(
                f"{file} is damaged ({str(exc).splitlines()[0]}): its labels could not be looked "
                "through. Remove it, import the labels again, and run the erasure again"
            ) from exc
        theirs = pc.is_in(table.column(REQUEST_ID), value_set=ids)
        count = pc.sum(theirs).as_py() or 0
        if count:
            sink = pa.BufferOutputStream()
            pq.write_table(table.filter(pc.invert(theirs)), sink, compression="zstd")
            write_atomically(file, sink.getvalue().to_pybytes())
            erasure.labels += count
