"""Labels that come later: what a table of them has to say, where it is kept, which row gets which.

A table of labels names rows in one of two ways: by `request_id` (and `request_row`, 0 where the
column is absent), or by entity keys and `event_timestamp`. It has a number `label`, and may say in
`known_at` when that became known; else it is known from its import on. The tables lie in

    <home>/predictions/labels/model=<name>/<request or entity>-<digest>.parquet

so that one that is imported twice is there once. Of several labels of one row the one that became
known last holds; two that became known at the same moment and differ are no label.

A label that names a request holds before one that names entities; of those, one with more keys
before one with fewer. A label of entities is taken where all keys are equal and its moment is the
nearest within a tolerance.
"""

import hashlib
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
from tasks.kernel.files import private_folder
from tasks.kernel.settings import bring, put
from tasks.predictions import schema as log
from tasks.predictions.reading import LogQuery, ReadTally, logged_columns, read_rows

logger = logging.getLogger(__name__)

LABEL, KNOWN_AT = "label", "known_at"
MAX_LABELS = 20_000_000
"""Labels of one kind that are held in memory while rows are joined."""
TOLERANCE = timedelta(minutes=5)
MICROSECOND = timedelta(microseconds=1)
_AT, _ROW, _NUMBER = "at", "row", "number"
_OF_REQUEST = [log.REQUEST_ID, log.REQUEST_ROW]
_KINDS = {
    **{log.REQUEST_ID: pa.string(), log.REQUEST_ROW: pa.int32(), log.EVENT_TIME: log.MOMENT_TYPE},
    **{LABEL: pa.float64(), KNOWN_AT: log.MOMENT_TYPE},
}
"""Types of the columns of labels; all others are entity keys, which are texts."""


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


def import_labels(
    home: Path, model: str, source: Path, now: datetime, classes: Sequence[str] = ()
) -> LabelImport:
    """Check a Parquet table of labels and keep it.

    Args:
        home: state folder.
        model: registered model.
        source: the table.
        now: from when on labels without `known_at` are known.
        classes: of a label that is one of several: their names, in order. The table has the names,
            and their numbers are kept.

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
    if classes:
        table = _numbered(table, source, classes)
    kind = log.BY_REQUEST if keys == [log.REQUEST_ID, log.REQUEST_ROW] else log.BY_ENTITY
    normal = _normal(table, keys, source, now)
    known = normal.filter(pc.is_valid(normal.column(LABEL)))
    given = [n for n in normal.schema.names if n != KNOWN_AT or KNOWN_AT in table.schema.names]
    file = log.labels_folder(home, model) / f"{kind}-{_digest(known.select(given))}.parquet"
    if not file.exists():
        private_folder(log.log_root(home))
        sink = pa.BufferOutputStream()
        pq.write_table(known, sink, compression="zstd")
        put(file, sink.getvalue().to_pybytes())
    return LabelImport(file, kind, known.num_rows, normal.num_rows - known.num_rows)


def _keys_of(table: pa.Table, source: Path) -> list[str]:
    names = table.schema.names
    if LABEL not in names:
        raise DataContractError(
            f"{source} has no column {LABEL!r}, only {', '.join(names) or 'none'}; expected it, "
            f"and {log.REQUEST_ID} or entity keys with {log.EVENT_TIME}. Nothing was imported"
        )
    if log.REQUEST_ID in names:
        return [log.REQUEST_ID, log.REQUEST_ROW]
    others = [n for n in names if n not in (LABEL, KNOWN_AT, log.EVENT_TIME, log.REQUEST_ROW)]
    if log.EVENT_TIME not in names or not others:
        raise DataContractError(
            f"{source} has the columns {', '.join(names)}; expected {log.REQUEST_ID}, or entity "
            f"keys and {log.EVENT_TIME}, beside {LABEL}. Nothing was imported"
        )
    return [*others, log.EVENT_TIME]


def _numbered(table: pa.Table, source: Path, classes: Sequence[str]) -> pa.Table:
    """The table with the number of each label's class."""
    given = table.column(LABEL).cast(pa.string())
    numbers = pc.index_in(given, value_set=pa.array(classes))
    unknown = given.filter(pc.and_(pc.is_valid(given), pc.is_null(numbers)))
    if len(unknown):
        raise DataContractError(
            f"{source} has the label {unknown[0].as_py()!r} and others that are no class in "
            f"{len(unknown):,} rows; expected {', '.join(classes)}, or null. Nothing was imported"
        )
    return table.set_column(table.schema.get_field_index(LABEL), LABEL, numbers)


def _normal(table: pa.Table, keys: Sequence[str], source: Path, now: datetime) -> pa.Table:
    """The columns under the names and types that a join expects."""
    num_rows, given = table.num_rows, [*keys, LABEL, KNOWN_AT]
    absent = {log.REQUEST_ROW: np.zeros(num_rows), KNOWN_AT: pa.nulls(num_rows, log.MOMENT_TYPE)}
    for name in absent.keys() - table.schema.names:
        table = table.append_column(name, pa.array(absent[name]))
    names = [n if n in _KINDS else log.ENTITY + n.removeprefix(log.ENTITY) for n in given]
    schema = pa.schema([(name, _KINDS.get(name, pa.string())) for name in names])
    try:
        normal = table.select(given).rename_columns(names).cast(schema)
    except pa.ArrowException as exc:
        raise DataContractError(
            f"{source}: {str(exc).splitlines()[0]}; expected numbers as labels, texts or whole "
            "numbers as keys, and moments with a time zone. Nothing was imported"
        ) from exc
    since = pc.fill_null(normal.column(KNOWN_AT), pa.scalar(now, log.MOMENT_TYPE))
    normal = normal.set_column(len(given) - 1, KNOWN_AT, since)
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


@dataclass
class JoinTally:
    """What a join met; complete when its rows were all taken.

    Attributes:
        rows: answered rows that were read.
        labelled: of them, rows with a label.
        corrected: labels that a later one replaced.
        conflicting: rows with two different labels of the same moment; they have none.
        unmatched: labels that met no row that was read; of those that name entities only such as
            lie near the window are counted.
    """

    rows: int = 0
    labelled: int = 0
    corrected: int = 0
    conflicting: int = 0
    unmatched: int = 0


def labelled_rows(
    home: Path,
    query: LogQuery,
    columns: Sequence[str],
    *,
    known_by: datetime,
    tally: JoinTally,
    read: ReadTally | None = None,
    shift: timedelta = timedelta(0),
) -> Iterator[pa.Table]:
    """Answered rows with the column `label`, null where none is known; all tracks told apart.

    Args:
        home: state folder.
        query: rows; each of them is kept, with a label or without.
        columns: wanted; keys are added where the join needs them, and taken out again.
        known_by: labels that became known later are left out.
        tally: is filled.
        read: likewise.
        shift: added to the moments of rows first, where labels are of recorded data that is played.

    Raises:
        DataContractError: more than `MAX_LABELS` labels, or an unknown column.
    """
    join = LabelJoin(home, query, known_by, tally, shift)
    join.load()
    for table in read_rows(home, query, list(dict.fromkeys([*columns, *join.columns])), tally=read):
        label = join.find(table).label
        tally.rows += table.num_rows
        tally.labelled += int((~np.isnan(label)).sum())
        yield table.select(list(columns)).append_column(LABEL, pa.array(label, from_pandas=True))
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
        has_labels: whether there is any table of labels.
    """

    def __init__(
        self,
        home: Path,
        query: LogQuery,
        known_by: datetime,
        tally: JoinTally,
        shift: timedelta = timedelta(0),
    ) -> None:
        """See `labelled_rows`; nothing but the heads of files is read yet."""
        folder = bring(log.labels_folder(home, query.model))
        self._by_request = sorted(folder.glob(f"{log.BY_REQUEST}-*.parquet"))
        self._by_entity = _by_keys(folder)
        self.has_labels = bool(self._by_request or self._by_entity)
        self._keys = _logged_keys(self._by_entity, home, query)
        self.query, self._known_by, self._tally, self._shift = query, known_by, tally, shift
        self._loaded: list[_Labels] = []

    @property
    def columns(self) -> list[str]:
        """Columns of rows that `find` needs."""
        return [*_OF_REQUEST, log.EVENT_TIME, *self._keys]

    @property
    def unmatched(self) -> int:
        """Labels that met no row."""
        return sum(int((~labels.met).sum()) for labels in self._loaded)

    def load(self, requests: pa.ChunkedArray | None = None) -> None:
        """Read the labels.

        Args:
            requests: ids of all rows that will be looked up, so that no other label is held in
                memory; None where they are not known.

        Raises:
            DataContractError: a table is damaged, or they have more than `MAX_LABELS` labels.
        """
        wanted = None if requests is None else ds.field(log.REQUEST_ID).isin(requests.unique())
        if self._by_request:
            of_request = self._read(self._by_request, wanted)
            self._loaded = [_Labels(of_request, _OF_REQUEST, self._tally, by_moment=False)]
        near = _near(self.query.window, self._shift)
        for keys, files in self._by_entity.items():
            of_entity = self._read(files, near)
            self._loaded.append(_Labels(of_entity, list(keys), self._tally, by_moment=True))

    def find(self, rows: pa.Table) -> Found:
        """What is known of rows that have at least the needed columns."""
        label = np.full(rows.num_rows, np.nan)
        known = np.full(rows.num_rows, np.iinfo(np.int64).min)
        arrived = rows.column(log.EVENT_TIME).cast(pa.int64())
        moments = np.asarray(arrived) + self._shift // MICROSECOND
        for labels in self._loaded:
            if set(labels.keys) <= set(rows.column_names):
                frame = rows.select(labels.keys).to_pandas()
                asked = frame.assign(**{_AT: moments, _ROW: np.arange(len(moments))})
                labels.find(asked[np.isnan(label)].dropna(subset=labels.keys), label, known)
        return Found(label, known, moments)

    def _read(self, files: Sequence[Path], wanted: ds.Expression | None) -> pd.DataFrame:
        """Wanted labels of some tables that are known."""
        tables, rows = [], 0
        for file in files:
            try:
                tables.append(pq.read_table(file, filters=wanted))
            except (OSError, pa.ArrowException) as exc:
                raise _damaged(file, exc) from exc
            rows += tables[-1].num_rows
            if rows > MAX_LABELS:
                raise DataContractError(
                    f"{file.parent} has more than {MAX_LABELS:,} labels for the rows in question; "
                    "expected no more at one time. Move files that are no longer needed out of it. "
                    "Nothing was joined"
                )
        whole = pa.concat_tables(tables, promote_options="default")
        latest = pa.scalar(self._known_by.astimezone(UTC), log.MOMENT_TYPE)
        frame: pd.DataFrame = whole.filter(pc.field(KNOWN_AT) <= latest).to_pandas()
        return frame


def _by_keys(folder: Path) -> dict[tuple[str, ...], list[Path]]:
    """Tables of labels by the entity keys that they name; those of most keys first."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for file in sorted(folder.glob(f"{log.BY_ENTITY}-*.parquet")):
        try:
            names = pq.read_schema(file).names
        except (OSError, pa.ArrowException) as exc:
            raise _damaged(file, exc) from exc
        keys = tuple(sorted(name for name in names if name.startswith(log.ENTITY)))
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


def _near(window: TimeWindow | None, shift: timedelta) -> ds.Expression | None:
    """Moments of the labels that rows of a window can meet."""
    if window is None:
        return None
    moment = ds.field(log.EVENT_TIME)
    first, last = window.start + shift - TOLERANCE, window.end + shift + TOLERANCE
    return (moment >= first) & (moment <= last)


class _Labels:
    """Labels by request and row, or by entity keys and the nearest moment.

    Attributes:
        met: whether a row had the label, in the order of the labels.
    """

    def __init__(
        self, labels: pd.DataFrame, keys: list[str], tally: JoinTally, *, by_moment: bool
    ) -> None:
        labels = _one_of_each(labels, [*keys, log.EVENT_TIME] if by_moment else keys, tally)
        self.keys, self.met = keys, np.zeros(len(labels), bool)
        self._label = labels[LABEL].to_numpy(np.float64)
        self._known = _int_us(labels[KNOWN_AT])
        self._index: pd.MultiIndex | None = None
        if by_moment:
            timed = {_AT: _int_us(labels[log.EVENT_TIME]), _NUMBER: np.arange(len(labels))}
            named = labels[keys].assign(**timed)
            self._timed = named.sort_values(_AT, kind="stable")
        else:
            self._index = pd.MultiIndex.from_frame(labels[keys])

    def find(self, asked: pd.DataFrame, label: NDArray[Any], known: NDArray[Any]) -> None:
        """Fill in what is known of these rows."""
        if self._index is not None:
            number = self._index.get_indexer(pd.MultiIndex.from_frame(asked[self.keys]))
            row = asked[_ROW].to_numpy()[number >= 0]
            number = number[number >= 0]
        else:
            found = pd.merge_asof(
                asked.sort_values(_AT, kind="stable"),
                self._timed,
                on=_AT,
                by=self.keys,
                direction="nearest",
                tolerance=TOLERANCE // MICROSECOND,
            ).dropna(subset=[_NUMBER])
            row, number = found[_ROW].to_numpy(np.intp), found[_NUMBER].to_numpy(np.intp)
        label[row], known[row] = self._label[number], self._known[number]
        self.met[number] = True


def _damaged(file: Path, exc: Exception) -> DataContractError:
    return DataContractError(
        f"{file} is damaged ({str(exc).splitlines()[0]}); expected a whole table of labels. "
        "Remove it and import the labels again. Nothing was joined"
    )


def _one_of_each(labels: pd.DataFrame, keys: list[str], tally: JoinTally) -> pd.DataFrame:
    """One label of each key: the one that became known last, and none where two of those differ."""
    labels = labels.drop_duplicates([*keys, LABEL, KNOWN_AT]).sort_values(KNOWN_AT, kind="stable")
    newest = labels.groupby(keys)[KNOWN_AT].transform("max")
    last = labels[labels[KNOWN_AT] == newest]
    clash = last.duplicated(keys, keep=False)
    tally.corrected += int(len(labels) - len(last))
    tally.conflicting += int(last[clash].drop_duplicates(keys).shape[0])
    return last[~clash].reset_index(drop=True)


def _int_us(moments: pd.Series) -> NDArray[np.int64]:
    whole: NDArray[np.int64] = moments.dt.as_unit("us").astype("int64").to_numpy()
    return whole


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
    rows = pa.schema([(log.REQUEST_ID, pa.string()), (log.REQUEST_ROW, pa.int32())]).empty_table()
    label, since = np.empty(0), np.empty(0, np.int64)
    if tables:
        rows = _first_of_each(pa.concat_tables(tables))
        join.load(rows.column(log.REQUEST_ID))
        found = join.find(rows)
        has = ~np.isnan(found.label)
        rows, label = rows.filter(pa.array(has)), found.label[has]
        since = np.maximum(found.known, found.moments + seen_after // MICROSECOND)[has]
    frame: pd.DataFrame = rows.select(_OF_REQUEST).to_pandas()
    frame[LABEL] = label
    frame[KNOWN_AT] = pd.to_datetime(pd.Series(since), unit="us", utc=True)
    return frame


def _first_of_each(rows: pa.Table) -> pa.Table:
    """Of each row of a request the one that arrived first, in the order of the rows."""
    frame = rows.select([*_OF_REQUEST, log.EVENT_TIME]).to_pandas()
    arrived = frame.sort_values(log.EVENT_TIME, kind="stable")
    first = arrived.drop_duplicates(_OF_REQUEST).index.sort_values()
    return rows.take(pa.array(first.to_numpy()))
