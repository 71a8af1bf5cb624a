"""Faults on demand: landed rows as they would be if a feed had broken on a given day.

A fault is written `kind[=target]@[YYYY-]MM-DD[THH:MM][:amount][:duration]`, such as
`freeze@08-01:36h` or `scale=weather.wind_speed:1.609@07-10`. Days begin at midnight of the use
case's zone. Rows outside of the fault's time, and all other tables, stay as they are, bit by bit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from typing import NamedTuple, NoReturn, get_args
from zoneinfo import ZoneInfo

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import NonNegativeFloat, PositiveInt

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.clock import TimeZone
from tasks.contracts.data import FeatureSnapshot, LandedRows, TableRef
from tasks.contracts.replay import FaultKind
from tasks.features.config import FeatureConfig
from tasks.features.offline.duck import duckdb_session, sql_moment, sql_name, sql_text
from tasks.features.snapshot import DATA_FILE, ROW_GROUP_ROWS
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
AMOUNTS: Mapping[str, tuple[float, float, str]] = {
    "scale": (1e-9, 1e9, "a factor"),
    "timezone": (-24, 24, "hours"),
    "labels-flipped": (1e-9, 1, "a share of the rows"),
}
"""What an amount may be, of the kinds that have one."""
NEEDED = ("scale", "labels-flipped")
NUMBERS = ("BIGINT", "INTEGER", "DOUBLE", "FLOAT")
CLOCK_PARTS = ("year", "month", "day", "hour", "minute", "second", "weekday")
"""Columns that go on while a sensor is frozen: they are of its clock."""
KELVIN = 200
"""No place on earth has so many degrees Celsius or Fahrenheit as its median."""
FOLDER = "faults"
WRITTEN = re.compile(
    r"(?P<kind>[a-z-]+)(=(?P<target>[^@,]+?))?(?P<early>:[^@:]+)?"
    r"@((?P<year>\d{4})-)?(?P<month>\d{2})-(?P<day>\d{2})"
    r"(T(?P<hour>\d{2}):(?P<minute>\d{2}))?(?P<rest>(:[^:]+)*)"
)
EXAMPLE = "celsius@07-10,freeze@08-01:36h,scale=weather.wind_speed:1.609@07-10"


class Fault(Contract):
    """What breaks, from when on, and how much; its text gives the same fault again."""

    kind: FaultKind
    start: datetime
    end: datetime | None = None
    amount: float | None = None
    target: str | None = None
    zone: TimeZone = "UTC"

    def __str__(self) -> str:
        local = self.start.astimezone(ZoneInfo(self.zone))
        text = f"{self.kind}={self.target}" if self.target else str(self.kind)
        text += f"@{local:%Y-%m-%d}" + (f"T{local:%H:%M}" if local.time() != time.min else "")
        text += f":{self.amount!r}" if self.amount is not None else ""
        if self.end is None:
            return text
        hours = (self.end - self.start) // timedelta(hours=1)
        return f"{text}:{hours // 24}d" if hours % 24 == 0 else f"{text}:{hours}h"


def parse_faults(text: str, history: TimeWindow, zone: str = "UTC") -> tuple[Fault, ...]:
    """The faults of a text, several separated by commas, in its order.

    Args:
        text: see the head of this module. Without a year the day is the first such in the history.
        history: a fault begins inside.
        zone: whose midnights begin the days.

    Raises:
        ConfigurationError: a kind, day, amount or duration that cannot be.
    """
    return tuple(_parsed(one.strip(), history, zone) for one in text.split(","))


def _parsed(text: str, history: TimeWindow, zone: str) -> Fault:
    match = WRITTEN.fullmatch(text)
    if match is None:
        _refuse(text, "is no fault", f"such as {EXAMPLE}")
    kind = next((kind for kind in KINDS if kind == match["kind"]), None)
    if kind is None:
        _refuse(text, f"has the unknown kind {match['kind']!r}", f"one of {', '.join(KINDS)}")
    amount: float | None = None
    length: timedelta | None = None
    for part in f"{match['early'] or ''}{match['rest']}".split(":")[1:]:
        if found := re.fullmatch(r"([1-9]\d{0,5})([hd])", part):
            unit = "hours" if found[2] == "h" else "days"
            length, twice = timedelta(**{unit: int(found[1])}), length is not None
        else:
            amount, twice = _number(text, part), amount is not None
        if twice:
            _refuse(text, "says an amount or a duration twice", "one of each at most")
    _check_amount(text, kind, amount)
    start = _moment(text, match, history, zone)
    end = None if length is None else start + length
    return Fault(kind=kind, start=start, end=end, amount=amount, target=match["target"], zone=zone)


def _refuse(text: object, seen: str, expected: str) -> NoReturn:
    raise ConfigurationError(f"fault {str(text)!r} {seen}; expected {expected}. Nothing was run")


def _number(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        _refuse(text, f"has {part!r}", "a number, or a duration such as 36h or 7d")


def _check_amount(text: str, kind: FaultKind, amount: float | None) -> None:
    low, high, what = AMOUNTS.get(kind, (0.0, 0.0, "no amount"))
    fits = amount is None if kind not in AMOUNTS else amount is None or low <= amount <= high
    if not fits or (amount is None and kind in NEEDED) or (kind == "timezone" and amount == 0):
        expected = f"{what} from {low:g} to {high:g}" if kind in AMOUNTS else "none"
        _refuse(text, f"has the amount {amount}", f"for {kind} {expected}")


def _moment(text: str, match: re.Match[str], history: TimeWindow, zone: str) -> datetime:
    at = time(0, 0)
    years = range(history.start.year - 1, history.end.year + 2)
    for year in [int(match["year"])] if match["year"] else years:
        try:
            day = date(year, int(match["month"]), int(match["day"]))
            at = time(int(match["hour"] or 0), int(match["minute"] or 0))
        except ValueError:
            continue
        moment = datetime.combine(day, at, ZoneInfo(zone)).astimezone(UTC)
        if history.start <= moment < history.end:
            return moment
    _refuse(text, "begins on a day that is not in the history", f"a day of {history}")


class FaultyRows(Contract):
    """Landed rows of which one table was broken on purpose."""

    landed: LandedRows
    described: str
    table: str
    columns: tuple[str, ...]
    num_changed: PositiveInt
    size: NonNegativeFloat | None


class _Place(NamedTuple):
    table: RawTable
    column: str

    def __str__(self) -> str:
        return f"{self.table.name}.{self.column}"


@dataclass(frozen=True)
class _Change:
    """SQL of what becomes of the rows inside the fault's time.

    Args:
        table: whose rows they are.
        told: what happens, for people.
        new: column to its new value.
        drop: condition of rows that do not arrive.
        joined: what `rows` is joined with for it.
    """

    table: RawTable
    told: str
    new: Mapping[str, str] = field(default_factory=dict)
    drop: str = "FALSE"
    joined: str = ""


def inject(
    landed: LandedRows,
    fault: Fault,
    config: FeatureConfig,
    store: ArtifactStore,
    units: Mapping[str, str],
) -> FaultyRows:
    """The landed rows with one table as the fault leaves it; made once, kept in the store.

    Args:
        landed: the undisturbed history.
        fault: of any kind but `labels-flipped`.
        config: the raw tables.
        store: holds the rows, and takes the faulty ones.
        units: unit of columns that are declared to have one, by `table.column`.

    Raises:
        ConfigurationError: the use case has no such target, or nothing would change.
    """
    key = content_key(code_digest(__file__), landed, list(config.raw_tables), fault, dict(units))

    def build(folder: StagedFolder) -> FaultyRows:
        with duckdb_session(folder.path.parent) as con:
            refs = {ref.name: ref for ref in landed.tables}
            for table in config.raw_tables:
                path = sql_text(store.path(refs[table.name].artifact))
                con.execute(
                    f"CREATE TEMP VIEW {sql_name(table.name)} AS SELECT *, "
                    f"file_row_number AS falaj_row FROM read_parquet({path}, file_row_number=true)"
                )
            change = _Planner(con, fault, config, units, landed.window).plan()
            return _written(con, change, fault, landed, folder)

    return store.build_once(FOLDER, key, FaultyRows, build)


def _written(
    con: duckdb.DuckDBPyConnection,
    change: _Change,
    fault: Fault,
    landed: LandedRows,
    folder: StagedFolder,
) -> FaultyRows:
    table, columns = change.table, change.table.columns
    during = f"({_during(fault, str(table.time_column))})"
    old = {c: f"falaj_rows.{sql_name(c)}" for c in columns}
    new = {c: f"({value})::{columns[c]}" for c, value in change.new.items()}
    source = f"{sql_name(table.name)} AS falaj_rows {change.joined}"
    lost = f"coalesce({during} AND ({change.drop}), FALSE)"
    differs = " OR ".join([f"{new[c]} IS DISTINCT FROM {old[c]}" for c in new] or ["FALSE"])
    moved = f"{during} AND NOT {lost} AND ({differs})"
    sizes = [
        f"avg(abs({new[c]} - {old[c]})) FILTER ({moved} AND {new[c]} <> {old[c]}) "
        f"/ nullif(stddev({old[c]}), 0)"
        for c in new
        if columns[c] in NUMBERS
    ]
    counts = f"count(*) FILTER ({lost}), count(*) FILTER ({moved})"
    found = con.execute(f"SELECT {', '.join([counts, *sizes])} FROM {source}").fetchall()[0]
    num_lost, num_moved, known = found[0], found[1], [size for size in found[2:] if size]
    if not num_lost + num_moved:
        _refuse(fault, "changes no row", "a time and target with rows of theirs")
    selected = ", ".join(
        (f"CASE WHEN {during} THEN {new[c]} ELSE {old[c]} END" if c in new else old[c])
        + f" AS {sql_name(c)}"
        for c in columns
    )
    target = folder.path / f"{table.name}.parquet"
    con.execute(
        f"COPY (SELECT {selected} FROM {source} WHERE NOT {lost} ORDER BY falaj_row) "
        f"TO {sql_text(target)} (FORMAT parquet)"
    )
    ref = TableRef(
        name=table.name,
        artifact=folder.artifact(target.name),
        num_rows=pq.read_metadata(target).num_rows,
    )
    tables = tuple(ref if each.name == ref.name else each for each in landed.tables)
    gone = f", {num_lost:,} left out" if num_lost else ""
    return FaultyRows(
        landed=landed.model_copy(update={"tables": tables}),
        described=f"{change.told} {_lasting(fault)}: {num_moved:,} rows changed{gone}",
        table=table.name,
        columns=tuple(change.new),
        num_changed=num_lost + num_moved,
        size=sum(known) / len(known) if known else None,
    )


def _during(fault: Fault, column: str) -> str:
    moment = f"falaj_rows.{sql_name(column)}"
    until = f" AND {moment} < {sql_moment(fault.end)}" if fault.end else ""
    return f"{moment} >= {sql_moment(fault.start)}{until}"


def _lasting(fault: Fault) -> str:
    until = f" to {fault.end:%Y-%m-%d %H:%MZ}" if fault.end else " on"
    return f"from {fault.start:%Y-%m-%d %H:%MZ}{until}"


@dataclass(frozen=True)
class _Planner:
    """Chooses what breaks; without a target by a rule that asks for nothing but the data."""

    con: duckdb.DuckDBPyConnection
    fault: Fault
    config: FeatureConfig
    units: Mapping[str, str]
    history: TimeWindow

    def plan(self) -> _Change:
        """The change of the fault's kind."""
        plans = {
            "celsius": self._celsius,
            "scale": self._scale,
            "freeze": self._freeze,
            "timezone": self._timezone,
            "category-split": self._split,
            "station-missing": self._missing,
        }
        return plans[self.fault.kind]()

    def _places(self, kinds: Collection[str], *, key: bool = False) -> list[_Place]:
        """Columns of tables with history, of these types; of the key, or not."""
        return [
            _Place(table, column)
            for table in self.config.raw_tables
            if table.time_column
            for column, kind in table.columns.items()
            if kind in kinds and (column in table.key) == key and column != table.time_column
        ]

    def _named(self, places: Sequence[_Place], what: str) -> list[_Place]:
        """Those that the target names: all without one."""
        target = self.fault.target
        found = [p for p in places if target in (None, str(p), p.column, p.table.name)]
        if not found:
            known = ", ".join(map(str, places)) or "no such column"
            _refuse(self.fault, f"finds no {what} {target or ''}".rstrip(), f"one of {known}")
        return found

    def _celsius(self) -> _Change:
        """All columns of one table declared in Fahrenheit, else the first called temp...

        Values in Kelvin, by their median, become Celsius too.
        """
        places = self._places(NUMBERS)
        if self.fault.target is None:
            declared = [p for p in places if self.units.get(str(p)) == "fahrenheit"]
            places = declared or [p for p in places if p.column.startswith("temp")][:1]
        found = self._named(places, "temperature")
        table = found[0].table
        columns = [p.column for p in found if p.table == table]
        first = f"falaj_rows.{sql_name(columns[0])}"
        middle = f"SELECT median({first}) FROM {sql_name(table.name)} AS falaj_rows"
        kelvin = (self.con.execute(middle).fetchall()[0][0] or 0) > KELVIN
        new = "falaj_rows.{} - 273.15" if kelvin else "(falaj_rows.{} - 32) / 1.8"
        told = f"{', '.join(columns)} of {table.name} in Celsius instead of "
        told += "Kelvin" if kelvin else "Fahrenheit"
        return _Change(table, told, {c: new.format(sql_name(c)) for c in columns})

    def _scale(self) -> _Change:
        if self.fault.target is None:
            _refuse(self.fault, "names no column", "one, such as scale=weather.wind_speed:1.609")
        table, column = self._named(self._places(NUMBERS), "number")[0]
        factor = float(self.fault.amount or 1)
        told = f"{column} of {table.name} times {factor:g}"
        return _Change(table, told, {column: f"falaj_rows.{sql_name(column)} * {factor!r}"})

    def _freeze(self) -> _Change:
        """Every reading of the most regularly sampled table stays as it was last before."""
        named = self._named(self._places(NUMBERS), "number")
        named = [p for p in named if p.column not in CLOCK_PARTS]
        table = self._most_regular([p.table for p in named])
        columns = [p.column for p in named if p.table == table]
        at, entity = sql_name(str(table.time_column)), self._entity(table)
        last = ", ".join(f"{sql_name(c)} := {sql_name(c)}" for c in columns)
        same = [f"falaj_last.{c} IS NOT DISTINCT FROM falaj_rows.{c}" for c in entity]
        joined = (
            f"LEFT JOIN (SELECT {''.join(f'{c}, ' for c in entity)}"
            f"max_by(struct_pack({last}), {at}) AS falaj_values FROM {sql_name(table.name)} "
            f"WHERE {at} < {sql_moment(self.fault.start)} GROUP BY ALL) AS falaj_last "
            f"ON {' AND '.join(same) or 'TRUE'}"
        )
        new = {
            c: f"CASE WHEN falaj_values IS NULL THEN falaj_rows.{sql_name(c)} "
            f"ELSE falaj_values.{sql_name(c)} END"
            for c in columns
        }
        return _Change(table, f"{table.name} repeats its last readings", new, joined=joined)

    def _timezone(self) -> _Change:
        """Times of the first table with history are off by the zone, else by an hour.

        What then lies before the fault, or after its end, is left out: it would stand there twice.
        """
        tables = [t for t in self.config.raw_tables if t.time_column]
        places = [_Place(table, str(table.time_column)) for table in tables]
        table, column = self._named(places, "time")[0]
        offset = self.fault.start.astimezone(ZoneInfo(self.fault.zone)).utcoffset()
        hours = self.fault.amount or (offset or timedelta(0)) / timedelta(hours=1) or 1.0
        moved = f"falaj_rows.{sql_name(column)} + to_seconds({hours * 3600:.0f})"
        end = min(self.fault.end or self.history.end, self.history.end)
        drop = f"{moved} < {sql_moment(self.fault.start)} OR {moved} >= {sql_moment(end)}"
        told = f"{column} of {table.name} is off by {hours:+g} hours"
        return _Change(table, told, {column: moved}, drop)

    def _split(self) -> _Change:
        """The most frequent value of the first category of the model arrives in other letters."""
        texts = self._places(("VARCHAR",)) + self._places(("VARCHAR",), key=True)
        order = list(self.config.training_set.categorical)
        texts.sort(key=lambda p: order.index(p.column) if p.column in order else len(order))
        place, value = self._value(texts)
        told = (value.lower(), value.upper(), f"{value} ", f"{value}_2")
        spelled = next(each for each in told if not self._count(place, each))
        column = f"falaj_rows.{sql_name(place.column)}"
        new = f"CASE WHEN {column} = {sql_text(value)} THEN {sql_text(spelled)} ELSE {column} END"
        what = f"{place.column} {value!r} of {place.table.name} arrives as {spelled!r}"
        return _Change(place.table, what, {place.column: new})

    def _missing(self) -> _Change:
        """Of the most regular table, the entity with most rows; all rows where there is none."""
        table = self._most_regular([t for t in self.config.raw_tables if t.time_column])
        keys = self._places(("VARCHAR",), key=True)
        if self.fault.target is None:
            keys = [p for p in keys if p.table == table]
        if not keys and self.fault.target in (None, table.name):
            return _Change(table, f"{table.name} sends nothing", drop="TRUE")
        place, value = self._value(keys)
        what = f"{place.table.name} has no rows of {place.column} {value!r}"
        drop = f"falaj_rows.{sql_name(place.column)} = {sql_text(value)}"
        return _Change(place.table, what, drop=drop)

    def _value(self, places: Sequence[_Place]) -> tuple[_Place, str]:
        """The place and value that the target names; of a place its most frequent value."""
        target = self.fault.target
        for place in places:
            if target is not None and self._count(place, target):
                return place, target
        place = self._named(places, "column or value")[0]
        name = sql_name(place.column)
        found = self.con.execute(
            f"SELECT {name} FROM {sql_name(place.table.name)} AS falaj_rows WHERE {name} <> '' "
            f"AND {_during(self.fault, str(place.table.time_column))} "
            "GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT 1"
        ).fetchall()
        if not found:
            _refuse(self.fault, f"finds no value of {place}", "rows with one in its time")
        return place, str(found[0][0])

    def _count(self, place: _Place, value: str) -> int:
        query = f"SELECT count(*) FROM {sql_name(place.table.name)} WHERE {sql_name(place.column)}"
        return int(self.con.execute(f"{query} = ?", [value]).fetchall()[0][0])

    def _most_regular(self, tables: Sequence[RawTable]) -> RawTable:
        """The table in which the same time passes most often from row to row of an entity."""
        shares = {}
        for table in tables:
            at, entity = sql_name(str(table.time_column)), self._entity(table)
            by = f"PARTITION BY {', '.join(entity)} " if entity else ""
            shares[table.name] = self.con.execute(
                f"SELECT max(n) / sum(n) FROM (SELECT count(*) AS n FROM (SELECT {at} - lag({at}) "
                f"OVER ({by}ORDER BY {at}) AS gap FROM {sql_name(table.name)}) "
                "WHERE gap IS NOT NULL GROUP BY gap)"
            ).fetchall()[0][0]
        return max(tables, key=lambda table: shares[table.name] or 0.0)

    @staticmethod
    def _entity(table: RawTable) -> list[str]:
        return [sql_name(column) for column in table.key if column != table.time_column]


def flip_labels(snapshot: FeatureSnapshot, fault: Fault, store: ArtifactStore) -> FeatureSnapshot:
    """The training set with a share of its labels turned around, chosen by the fault's own seed.

    A label of 0 or 1 becomes the other, a class the next one, a number is mirrored in the middle
    of the label's range.

    Raises:
        ConfigurationError: the fault's time has too few rows for its share.
    """
    key = content_key(code_digest(__file__), snapshot, fault)
    spec = snapshot.columns

    def build(folder: StagedFolder) -> FeatureSnapshot:
        rows = pq.read_table(store.path(snapshot.data))
        times = rows[spec.event_time].cast(pa.timestamp("us", "UTC")).to_numpy()
        after, before = (np.datetime64(m.replace(tzinfo=None)) for m in _span(fault, snapshot))
        inside = np.flatnonzero((times >= after) & (times < before))
        seed = int(content_key(fault)[:8], 16)
        number = round(float(fault.amount or 0) * len(inside))
        if not number:
            _refuse(fault, f"changes none of {len(inside):,} rows", "a larger share, or more time")
        chosen = np.random.default_rng(seed).choice(inside, number, replace=False)
        labels = rows[spec.label].to_numpy().copy()
        turned = labels.max() + labels.min() - labels
        labels[chosen] = ((labels + 1) % spec.num_labels if spec.classes else turned)[chosen]
        place = rows.column_names.index(spec.label)
        kept = pa.array(labels, rows.schema.field(place).type)
        table = rows.set_column(place, rows.schema.field(place), kept)
        pq.write_table(table, folder.path / DATA_FILE, row_group_size=ROW_GROUP_ROWS)
        data, parts = folder.artifact(DATA_FILE), folder.parts(DATA_FILE)
        return snapshot.model_copy(update={"data": data, "parts": parts})

    return store.build_once(FOLDER, key, FeatureSnapshot, build)


def _span(fault: Fault, snapshot: FeatureSnapshot) -> tuple[datetime, datetime]:
    return fault.start, fault.end or snapshot.window.end
