"""Which logged row has which label.

A label that names a request holds before one that names entities; of those, one with more keys
before one with fewer. A label of entities is taken where all keys are equal and its moment is the
nearest within a tolerance.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError
from tasks.predictions.labels import BY_ENTITY, BY_REQUEST, KNOWN_AT, LABEL, labels_folder
from tasks.predictions.reading import LogQuery, ReadTally, logged_columns, read_rows
from tasks.predictions.schema import ENTITY, EVENT_TIME, MOMENT_TYPE, REQUEST_ID, REQUEST_ROW

logger = logging.getLogger(__name__)

MAX_LABELS = 20_000_000
"""Labels of one kind that are held in memory while rows are joined."""
TOLERANCE = timedelta(minutes=5)


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
        unmatched: labels that met no row that was read; of those that name entities only such as
            lie near the window are counted.
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


def labelled_rows(
    home: Path,
    query: LogQuery,
    columns: Sequence[str],
    *,
    known_by: datetime,
    tally: JoinTally,
    read: ReadTally | None = None,
    expected_within: timedelta | None = None,
    tolerance: timedelta = TOLERANCE,
    shift: timedelta = timedelta(0),
) -> Iterator[pa.Table]:
    """Answered rows with the column `label`, null where none is known; all tracks told apart.

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
    join = LabelJoin(home, query, known_by, tally, tolerance, shift)
    join.load()
    for table in read_rows(home, query, list(dict.fromkeys([*columns, *join.columns])), tally=read):
        found = join.find(table)
        has = ~np.isnan(found.label)
        tally.rows += table.num_rows
        tally.labelled += int(has.sum())
        if expected_within is not None:
            waited = found.known[has] - found.moments[has]
            tally.late += int((waited > _us(expected_within)).sum())
        label = pa.array(found.label, from_pandas=True)
        yield table.select(list(columns)).append_column(LABEL, label)
    tally.unmatched += join.unmatched


@dataclass(frozen=True)
class Found:
    """What is known of some rows, in their order.

    Attributes:
        label: NaN where none is known.
        known: microseconds of the epoch at which the label became known; the least number where
            none is.
        moments: of the rows, likewise, in the time of the labels.
    """

    label: NDArray[np.float64]
    known: NDArray[np.int64]
    moments: NDArray[np.int64]


class LabelJoin:
    """The labels of a model that are known, and the rule which row gets which.

    Labels of entities are held in memory only where a row of the query's window can meet them.

    Attributes:
        query: the rows.
    """

    def __init__(
        self,
        home: Path,
        query: LogQuery,
        known_by: datetime,
        tally: JoinTally,
        tolerance: timedelta = TOLERANCE,
        shift: timedelta = timedelta(0),
    ) -> None:
        """See `labelled_rows`; nothing but the heads of files is read yet."""
        folder = labels_folder(home, query.model)
        self._by_request = sorted(folder.glob(f"{BY_REQUEST}-*.parquet"))
        self._by_entity = _by_keys(folder)
        self._keys = _logged_keys(self._by_entity, home, query)
        self.query, self._known_by, self._tally = query, known_by, tally
        self._tolerance, self._shift = tolerance, shift
        self._near = _moved(query.window, shift, tolerance)
        self._requests: list[_ByRequest] = []
        self._entities: list[_ByEntity] = []

    @property
    def has_labels(self) -> bool:
        """Whether there is any table of labels."""
        return bool(self._by_request or self._by_entity)

    @property
    def columns(self) -> list[str]:
        """Columns of rows that `find` needs."""
        return [REQUEST_ID, REQUEST_ROW, EVENT_TIME, *self._keys]

    @property
    def unmatched(self) -> int:
        """Labels that met no row."""
        return sum(r.unmatched for r in self._requests) + sum(e.unmatched for e in self._entities)

    def load(self, requests: pa.ChunkedArray | None = None) -> None:
        """Read the labels.

        Args:
            requests: ids of all rows that will be looked up, so that no other label is held in
                memory; None where they are not known.

        Raises:
            DataContractError: a table is damaged, or they have more than `MAX_LABELS` labels.
        """
        wanted = None if requests is None else ds.field(REQUEST_ID).isin(requests.unique())
        if self._by_request:
            labels = self._read(self._by_request, wanted)
            self._requests = [_ByRequest(labels, self._tally)]
        for keys, files in self._by_entity.items():
            labels = self._read(files, self._near)
            self._entities.append(_ByEntity(labels, keys, self._tolerance, self._tally))

    def find(self, rows: pa.Table) -> Found:
        """What is known of rows that have at least the needed columns."""
        label = np.full(rows.num_rows, np.nan)
        known = np.full(rows.num_rows, np.iinfo(np.int64).min)
        moments = np.asarray(rows.column(EVENT_TIME).cast(pa.int64())) + _us(self._shift)
        for by_request in self._requests:
            by_request.find(rows, label, known)
        for by_entity in self._entities:
            by_entity.find(rows, moments, label, known)
        return Found(label, known, moments)

    def _read(self, files: Sequence[Path], wanted: ds.Expression | None) -> pd.DataFrame:
        """Wanted labels of some tables that are known."""
        tables, rows = [], 0
        for file in files:
            table = _read_labels(file, wanted)
            rows += table.num_rows
            if rows > MAX_LABELS:
                raise DataContractError(
                    f"{file.parent} has more than {MAX_LABELS:,} labels for the rows in question; "
                    "expected no more at one time. Move files that are no longer needed out of it. "
                    "Nothing was joined"
                )
            tables.append(table)
        whole = pa.concat_tables(tables, promote_options="default")
        latest = pa.scalar(self._known_by.astimezone(UTC), MOMENT_TYPE)
        known = pc.less_equal(whole.column(KNOWN_AT), latest)
        self._tally.not_yet_known += whole.num_rows - (pc.sum(known).as_py() or 0)
        frame: pd.DataFrame = whole.filter(known).to_pandas()
        return frame


def _by_keys(folder: Path) -> dict[tuple[str, ...], list[Path]]:
    """Tables of labels by the entity keys that they name; those of most keys first."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for file in sorted(folder.glob(f"{BY_ENTITY}-*.parquet")):
        try:
            names = pq.read_schema(file).names
        except (OSError, pa.ArrowException) as exc:
            raise _damaged(file, exc) from exc
        keys = tuple(sorted(name for name in names if name.startswith(ENTITY)))
        found.setdefault(keys, []).append(file)
    return dict(sorted(found.items(), key=lambda item: (-len(item[0]), item[0])))


def _logged_keys(tables: Iterable[tuple[str, ...]], home: Path, query: LogQuery) -> list[str]:
    """Of all keys that tables of labels name, those that the log has."""
    keys = list(dict.fromkeys(key for names in tables for key in names))
    if not keys:
        return keys
    logged = logged_columns(home, query.model, query.window).names
    if absent := [key for key in keys if key not in logged]:
        logger.warning(
            "labels of %s name %s, which no row of the log has in %s: nobody asked by these keys, "
            "or they are left out of the log. Such labels meet no row",
            *(query.model, ", ".join(absent), query.window or "any window"),
        )
    return [key for key in keys if key in logged]


def _moved(
    window: TimeWindow | None, shift: timedelta, tolerance: timedelta
) -> ds.Expression | None:
    """Moments of the labels that rows of a window can meet."""
    if window is None:
        return None
    moment = ds.field(EVENT_TIME)
    first, last = window.start + shift - tolerance, window.end + shift + tolerance
    return (moment >= pa.scalar(first, MOMENT_TYPE)) & (moment <= pa.scalar(last, MOMENT_TYPE))


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

    def __init__(
        self, labels: pd.DataFrame, keys: Sequence[str], tolerance: timedelta, tally: JoinTally
    ) -> None:
        self._keys = list(keys)
        labels = _of_each(labels, [*keys, EVENT_TIME], tally)
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
        """Fill in what is known of these rows and was not known yet; nothing without the keys."""
        if not set(self._keys) <= set(rows.column_names):
            return
        asked = rows.select(self._keys).to_pandas().assign(at=moments, row=np.arange(len(moments)))
        asked = asked[np.isnan(label)].dropna(subset=self._keys).sort_values("at", kind="stable")
        found = pd.merge_asof(
            asked,
            self._labels[[*self._keys, "at", "number"]],
            on="at",
            by=self._keys,
            direction="nearest",
            tolerance=self._tolerance,
        ).dropna(subset=["number"])
        at, number = found["row"].to_numpy(np.intp), found["number"].to_numpy(np.intp)
        label[at], known[at] = self._label[number], self._known[number]
        self._met[number] = True


def _read_labels(file: Path, wanted: ds.Expression | None) -> pa.Table:
    try:
        return pq.read_table(file, filters=wanted)
    except (OSError, pa.ArrowException) as exc:
        raise _damaged(file, exc) from exc


def _damaged(file: Path, exc: Exception) -> DataContractError:
    return DataContractError(
        f"{file} is damaged ({str(exc).splitlines()[0]}); expected a whole table of labels. "
        "Remove it and import the labels again. Nothing was joined"
    )


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
    ids = pc.cast(rows.column(REQUEST_ID), pa.string())  # no rows at all have no type
    made = pc.binary_join_element_wise(number, ids, ":")
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def _int_us(moments: pd.Series) -> NDArray[np.int64]:
    whole: NDArray[np.int64] = moments.dt.as_unit("us").astype("int64").to_numpy()
    return whole


def _us(span: timedelta) -> int:
    return span // timedelta(microseconds=1)


def labels_of_requests(home: Path, join: LabelJoin, seen_after: timedelta) -> pd.DataFrame:
    """Labels of the answered rows of a query, each row of a request once.

    A copy of a request arrives a moment after it, so that another label may be the nearest to it:
    the row that arrived first says which label all have.

    Args:
        home: state folder.
        join: labels that are known, and the query; nothing is loaded yet.
        seen_after: a row is looked at so long after it arrived.

    Returns:
        Columns `request_id`, `request_row`, `label`, and `known_at`: the moment from which both the
        row could be looked at and its label was known. Rows in this order have nothing put between
        them by a label that comes later.

    Raises:
        DataContractError: a table is damaged, or there are too many labels.
    """
    tables = list(read_rows(home, join.query, join.columns)) if join.has_labels else []
    if not tables:
        return _labels_table([], [], [], [])
    rows = _first_of_each(pa.concat_tables(tables))
    join.load(rows.column(REQUEST_ID))
    found = join.find(rows)
    has = ~np.isnan(found.label)
    since = np.maximum(found.known, found.moments + seen_after // timedelta(microseconds=1))
    named = rows.filter(pa.array(has))
    ids, numbers = (named.column(name).to_numpy() for name in (REQUEST_ID, REQUEST_ROW))
    return _labels_table(ids, numbers, found.label[has], since[has])


def _labels_table(ids: Any, numbers: Any, labels: Any, known: Any) -> pd.DataFrame:
    return pd.DataFrame(
        {
            REQUEST_ID: pd.Series(ids, dtype=str),
            REQUEST_ROW: pd.Series(numbers, dtype="int32"),
            LABEL: pd.Series(labels, dtype=float),
            KNOWN_AT: pd.to_datetime(pd.Series(known, dtype="int64"), unit="us", utc=True),
        }
    )


def _first_of_each(rows: pa.Table) -> pa.Table:
    """Of each row of a request the one that arrived first."""
    order = np.argsort(rows.column(EVENT_TIME).cast(pa.int64()).to_numpy(), kind="stable")
    ids = rows.column(REQUEST_ID).to_numpy()
    keys = pd.DataFrame(  # 64 bits are told apart much faster than ids
        {
            REQUEST_ID: pd.util.hash_array(ids, categorize=False),
            REQUEST_ROW: rows.column(REQUEST_ROW).to_numpy(),
        }
    )
    is_first = np.empty(rows.num_rows, bool)
    is_first[order] = ~keys.iloc[order].duplicated().to_numpy()
    return rows.filter(pa.array(is_first))
