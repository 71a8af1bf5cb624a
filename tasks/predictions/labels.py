"""Labels that come later: what a table of them has to say, and where it is kept.

A table of labels names rows in one of two ways: by `request_id` (and `request_row`, 0 where the
column is absent), or by entity keys and `event_timestamp`. It has a number `label`, and may say in
`known_at` when that became known; else it is known from its import on. The tables lie in

    <home>/predictions/labels/model=<name>/<request or entity>-<digest>.parquet

so that one that is imported twice is there once. Of several labels of one row the one that became
known last holds; two that became known at the same moment and differ are no label. Which row gets
which is said in `joining`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.kernel.errors import DataContractError
from tasks.kernel.files import private_folder, write_atomically
from tasks.predictions.schema import (
    ENTITY,
    EVENT_TIME,
    MOMENT_TYPE,
    REQUEST_ID,
    REQUEST_ROW,
    log_root,
)

LABEL, KNOWN_AT = "label", "known_at"
BY_REQUEST, BY_ENTITY = "request", "entity"


@dataclass(frozen=True)
class LabelImport:
    """What an import took.

    Attributes:
        file: where the labels lie now.
        kind: `request` or `entity`.
        rows: labels taken.
        without_label: rows whose label was null: nothing is known of them, and they were left out.
    """

    file: Path
    kind: str
    rows: int
    without_label: int


def labels_folder(home: Path, model: str) -> Path:
    """Where the labels of a model lie."""
    return log_root(home) / "labels" / f"model={quote(model, safe='')}"


def import_labels(home: Path, model: str, source: Path, now: datetime) -> LabelImport:
    """Check a Parquet table of labels and keep it.

    Args:
        home: state folder.
        model: registered model.
        source: the table.
        now: from when on labels without `known_at` are known.

    Raises:
        DataContractError: it is no Parquet, lacks columns, or holds what is no label.
        StorageError: the disk refused a write.
    """
    if not source.is_file():
        raise DataContractError(f"there is no file {source}. Nothing was imported")
    try:
        table = pq.read_table(source)
    except (OSError, pa.ArrowException) as exc:
        raise DataContractError(
            f"{source} cannot be read as Parquet ({str(exc).splitlines()[0]}); expected a table of "
            "labels. Nothing was imported"
        ) from exc
    keys = _keys_of(table, source)
    kind = BY_REQUEST if keys == [REQUEST_ID, REQUEST_ROW] else BY_ENTITY
    normal = _normal(table, keys, source, now)
    known = normal.filter(pc.is_valid(normal.column(LABEL)))
    given = [n for n in normal.schema.names if n != KNOWN_AT or KNOWN_AT in table.schema.names]
    file = labels_folder(home, model) / f"{kind}-{_digest(known.select(given))}.parquet"
    if not file.exists():
        private_folder(log_root(home))
        sink = pa.BufferOutputStream()
        pq.write_table(known, sink, compression="zstd")
        write_atomically(file, sink.getvalue().to_pybytes())
    return LabelImport(file, kind, known.num_rows, normal.num_rows - known.num_rows)


def _keys_of(table: pa.Table, source: Path) -> list[str]:
    names = table.schema.names
    if LABEL not in names:
        raise DataContractError(
            f"{source} has no column {LABEL!r}, only {', '.join(names) or 'none'}; expected it, "
            f"and {REQUEST_ID} or entity keys with {EVENT_TIME}. Nothing was imported"
        )
    if REQUEST_ID in names:
        return [REQUEST_ID, REQUEST_ROW]
    others = [n for n in names if n not in (LABEL, KNOWN_AT, EVENT_TIME, REQUEST_ROW)]
    if EVENT_TIME not in names or not others:
        raise DataContractError(
            f"{source} has the columns {', '.join(names)}; expected {REQUEST_ID}, or entity keys "
            f"and {EVENT_TIME}, beside {LABEL}. Nothing was imported"
        )
    return [*others, EVENT_TIME]


def _normal(table: pa.Table, keys: Sequence[str], source: Path, now: datetime) -> pa.Table:
    """The columns under the names and types that a join expects."""
    columns: dict[str, Any] = {}
    try:
        for key in keys:
            if key == REQUEST_ROW:
                given = REQUEST_ROW in table.schema.names
                rows = table.column(key) if given else pa.array(np.zeros(table.num_rows))
                columns[key] = pc.cast(rows, pa.int32())
            elif key == EVENT_TIME:
                columns[key] = pc.cast(table.column(key), MOMENT_TYPE)
            else:
                name = key if key == REQUEST_ID else ENTITY + key.removeprefix(ENTITY)
                columns[name] = pc.cast(table.column(key), pa.string())
        columns[LABEL] = pc.cast(table.column(LABEL), pa.float64())
        columns[KNOWN_AT] = (
            pc.cast(table.column(KNOWN_AT), MOMENT_TYPE)
            if KNOWN_AT in table.schema.names
            else pa.nulls(table.num_rows, MOMENT_TYPE)
        )
    except pa.ArrowException as exc:
        raise DataContractError(
            f"{source}: {str(exc).splitlines()[0]}; expected numbers as labels, texts or whole "
            "numbers as keys, and moments with a time zone. Nothing was imported"
        ) from exc
    columns[KNOWN_AT] = pc.fill_null(columns[KNOWN_AT], pa.scalar(now, MOMENT_TYPE))
    normal = pa.table(columns)
    bad = [name for name in normal.schema.names if name != LABEL and normal[name].null_count]
    finite = pc.all(pc.is_finite(normal.column(LABEL)), skip_nulls=True).as_py()
    if bad or finite is False:
        what = f"nulls in {', '.join(bad)}" if bad else "labels that are NaN or infinite"
        raise DataContractError(
            f"{source} has {what}; expected a key in each row, and a number or null as its label. "
            "Nothing was imported"
        )
    return normal


def _digest(table: pa.Table) -> str:
    """A digest of what the source said: labels that are imported again are there once."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()[:24]
