"""Labels that come later, and their join with what was logged.

A table of labels names rows in one of two ways: by `request_id` (and `request_row`, 0 where the
column is absent), or by entity keys and `event_timestamp`. It has a number `label`, and may say in
`known_at` when that became known; else it is known from its import on. The tables lie in

    <home>/predictions/labels/model=<name>/<request or entity>-<digest>.parquet

so that one that is imported twice is there once. Of several labels of one row the one that became
known last holds; two that became known at the same moment and differ are no label.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.errors import DataContractError, refused_writes_explained
from tasks.predictions.reading import LogQuery, ReadTally, read_rows
from tasks.predictions.schema import (
    ENTITY,
    EVENT_TIME,
    MOMENT_TYPE,
    REQUEST_ID,
    REQUEST_ROW,
    log_root,
)
from tasks.settings import private_folder, write_bytes_atomically

LABEL, KNOWN_AT = "label", "known_at"
BY_REQUEST, BY_ENTITY = "request", "entity"
MAX_LABELS = 20_000_000
"""Labels of one kind that are held in memory while rows are joined."""


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


@dataclass
class JoinTally:
    """What a join met; complete when its rows were all taken.

    Attributes:
        rows: answered rows that were read.
        labelled: of them, rows with a label.
        late: labelled rows whose label came later than it was expected.
        not_yet_known: labels that became known after the moment in question, left out.
        corrected: labels that a later one replaced.
        conflicting: rows with two different labels of the same moment; they have none.
        unmatched: labels that met no row that was read: of another window, or of a request that
            was never logged.
    """

    rows: int = 0
    labelled: int = 0
    late: int = 0
    not_yet_known: int = 0
    corrected: int = 0
    conflicting: int = 0
    unmatched: int = 0

    @property
    def unlabelled(self) -> int:
        """Rows without a label."""
        return self.rows - self.labelled


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
    told = [n for n in normal.schema.names if n != KNOWN_AT or KNOWN_AT in table.schema.names]
    file = _keep(known, told, labels_folder(home, model), kind)
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
                columns[key] = _request_rows(table)
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


def _request_rows(table: pa.Table) -> Any:
    if REQUEST_ROW in table.schema.names:
        return pc.cast(table.column(REQUEST_ROW), pa.int32())
    return pa.array(np.zeros(table.num_rows, np.int32))


def _keep(table: pa.Table, told: Sequence[str], folder: Path, kind: str) -> Path:
    """Write labels under a digest of what the source told: imported again, they are there once."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    digest = hashlib.sha256(_content(table.select(told))).hexdigest()[:24]
    file = folder / f"{kind}-{digest}.parquet"
    with refused_writes_explained(folder):
        private_folder(folder.parent.parent)
        folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_bytes_atomically(file, content)
    return file


def _content(table: pa.Table) -> bytes:
    """A table's rows as bytes that depend on nothing else."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    content: bytes = sink.getvalue().to_pybytes()
    return content


def labelled_rows(
    home: Path,
    query: LogQuery,
    columns: Sequence[str],
    *,
    known_by: datetime,
    tally: JoinTally,
    read: ReadTally | None = None,
    expected_within: timedelta | None = None,
    tolerance: timedelta = timedelta(minutes=5),
    shift: timedelta = timedelta(0),
) -> Iterator[pa.Table]:
    """Answered rows with the column `label`, null where none is known; all slots told apart.

    A label that names a request holds before one that names entities. That one is taken where all
    keys are equal and its moment is the nearest within `tolerance`.

    Args:
        home: state folder.
        query: rows; each of them is kept, with a label or without.
        columns: wanted; keys are added where the join needs them, and taken out again.
        known_by: labels that became known later are left out, and counted.
        tally: is filled.
        read: likewise.
        expected_within: a label that came later after its row's moment is counted as late.
        tolerance: between a row's moment and that of an entity's label.
        shift: added to the moments of rows first, where labels are of recorded data that is played.

    Raises:
        DataContractError: more than `MAX_LABELS` labels, or an unknown column.
    """
    requests = _load(home, query.model, BY_REQUEST, known_by, tally)
    entities = _load(home, query.model, BY_ENTITY, known_by, tally)
    by_request = _ByRequest(requests, tally) if requests is not None else None
    by_entity = _ByEntity(entities, tolerance, tally) if entities is not None else None
    needed = [REQUEST_ID, REQUEST_ROW, EVENT_TIME, *(by_entity.keys if by_entity else ())]
    for table in read_rows(home, query, list(dict.fromkeys([*columns, *needed])), tally=read):
        label = np.full(table.num_rows, np.nan)
        known = np.full(table.num_rows, np.iinfo(np.int64).min)
        moments = np.asarray(table.column(EVENT_TIME).cast(pa.int64())) + _us(shift)
        if by_request:
            by_request.find(table, label, known)
        if by_entity:
            by_entity.find(table, moments, label, known)
        has = ~np.isnan(label)
        tally.rows += table.num_rows
        tally.labelled += int(has.sum())
        if expected_within is not None:
            tally.late += int((known[has] - moments[has] > _us(expected_within)).sum())
        yield table.select(list(columns)).append_column(LABEL, pa.array(label, from_pandas=True))
    for index in (by_request, by_entity):
        if index is not None:
            tally.unmatched += index.unmatched


class _ByRequest:
    """Labels by request and row."""

    def __init__(self, labels: pd.DataFrame, tally: JoinTally) -> None:
        labels = _of_each(labels, [REQUEST_ID, REQUEST_ROW], tally)
        self._keys = _request_keys(pa.Table.from_pandas(labels, preserve_index=False))
        self._label = labels[LABEL].to_numpy(np.float64)
        self._known = _int_us(labels[KNOWN_AT])
        self._met = np.zeros(len(labels), bool)

    @property
    def unmatched(self) -> int:
        """Labels that met no row."""
        return int((~self._met).sum())

    def find(self, rows: pa.Table, label: NDArray[Any], known: NDArray[Any]) -> None:
        """Fill in what is known of these rows."""
        found = pc.index_in(_request_keys(rows), value_set=self._keys)
        index = np.asarray(found.fill_null(-1))
        hit = index >= 0
        label[hit], known[hit] = self._label[index[hit]], self._known[index[hit]]
        self._met[index[hit]] = True


class _ByEntity:
    """Labels by entity keys and moment."""

    def __init__(self, labels: pd.DataFrame, tolerance: timedelta, tally: JoinTally) -> None:
        self.keys = [name for name in labels.columns if name.startswith(ENTITY)]
        labels = _of_each(labels, [*self.keys, EVENT_TIME], tally)
        labels = labels.assign(at=_int_us(labels[EVENT_TIME]), number=np.arange(len(labels)))
        self._labels = labels.sort_values("at", kind="stable")
        self._label = labels[LABEL].to_numpy(np.float64)
        self._known = _int_us(labels[KNOWN_AT])
        self._met = np.zeros(len(labels), bool)
        self._tolerance = _us(tolerance)

    @property
    def unmatched(self) -> int:
        """Labels that met no row."""
        return int((~self._met).sum())

    def find(
        self, rows: pa.Table, moments: NDArray[Any], label: NDArray[Any], known: NDArray[Any]
    ) -> None:
        """Fill in what is known of these rows and was not known yet."""
        asked = rows.select(self.keys).to_pandas().assign(at=moments, row=np.arange(len(moments)))
        asked = asked[np.isnan(label)].dropna(subset=self.keys).sort_values("at", kind="stable")
        found = pd.merge_asof(
            asked,
            self._labels[[*self.keys, "at", "number"]],
            on="at",
            by=self.keys,
            direction="nearest",
            tolerance=self._tolerance,
        ).dropna(subset=["number"])
        at, number = found["row"].to_numpy(np.intp), found["number"].to_numpy(np.intp)
        label[at], known[at] = self._label[number], self._known[number]
        self._met[number] = True


def _load(
    home: Path, model: str, kind: str, known_by: datetime, tally: JoinTally
) -> pd.DataFrame | None:
    """All labels of a kind that were known by a moment; None where there are none."""
    tables, rows = [], 0
    for file in sorted(labels_folder(home, model).glob(f"{kind}-*.parquet")):
        table = _read_labels(file)
        rows += table.num_rows
        if rows > MAX_LABELS:
            raise DataContractError(
                f"{model} has more than {MAX_LABELS:,} labels; expected no more at one time. Move "
                f"files that are no longer needed out of {file.parent}. Nothing was joined"
            )
        tables.append(table)
    if not tables:
        return None
    whole = pa.concat_tables(tables, promote_options="default")
    known = pc.less_equal(whole.column(KNOWN_AT), pa.scalar(known_by.astimezone(UTC), MOMENT_TYPE))
    tally.not_yet_known += whole.num_rows - (pc.sum(known).as_py() or 0)
    frame: pd.DataFrame = whole.filter(known).to_pandas()
    return frame


def _read_labels(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (OSError, pa.ArrowException) as exc:
        raise DataContractError(
            f"{file} is damaged ({str(exc).splitlines()[0]}); expected a whole table of labels. "
            "Remove it and import the labels again. Nothing was joined"
        ) from exc


def _of_each(labels: pd.DataFrame, keys: list[str], tally: JoinTally) -> pd.DataFrame:
    """One label of each key: the one that became known last, and none where two of those differ."""
    labels = labels.drop_duplicates([*keys, LABEL, KNOWN_AT]).sort_values(KNOWN_AT, kind="stable")
    newest = labels.groupby(keys)[KNOWN_AT].transform("max")
    last = labels[labels[KNOWN_AT] == newest]
    clash = last.duplicated(keys, keep=False)
    tally.corrected += int(len(labels) - len(last))
    tally.conflicting += int(last[clash].drop_duplicates(keys).shape[0])
    return last[~clash].reset_index(drop=True)


def _request_keys(rows: pa.Table) -> pa.Array:
    number = pc.cast(rows.column(REQUEST_ROW), pa.string())
    made = pc.binary_join_element_wise(number, rows.column(REQUEST_ID), ":")
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def _int_us(moments: pd.Series) -> NDArray[np.int64]:
    whole: NDArray[np.int64] = moments.dt.as_unit("us").astype("int64").to_numpy()
    return whole


def _us(span: timedelta) -> int:
    return span // timedelta(microseconds=1)
