"""Faults on demand: landed rows as they would be if a feed had broken on a given day.

A fault is written `kind[=target]@[YYYY-]MM-DD[THH:MM][:amount][:duration]`, such as
`freeze@08-01:36h`; an amount may also follow the target, as in `scale=weather.wind_speed:1.609`.
Days begin at midnight of the use case's zone. Rows outside of the fault's time, and all other
tables, stay as they are, bit by bit.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
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
AMOUNTS = {"scale": (1e-9, 1e9), "timezone": (-24.0, 24.0), "labels-flipped": (1e-9, 1.0)}
"""Factor, hours, share of the rows: least and largest, of the kinds that have an amount."""
NUMBERS = ("BIGINT", "INTEGER", "DOUBLE", "FLOAT")
CLOCK_PARTS = ("year", "month", "day", "hour", "minute", "second", "weekday")
"""Columns that go on while a sensor is frozen: they are of its clock."""
KELVIN = 200
"""No place on earth has so many degrees Celsius or Fahrenheit as its median."""
FOLDER = "faults"
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
WRITTEN = re.compile(
    rf"(?P<kind>[a-z-]+)(?:=(?P<target>[^@:,]+))?(?::(?P<early>{NUMBER}))?"
    r"@(?:(?P<year>\d{4})-)?(?P<day>\d\d-\d\d)(?:T(?P<time>\d\d:\d\d))?"
    rf"(?::(?P<late>{NUMBER}))?(?::(?P<length>[1-9]\d{{0,5}})(?P<unit>[hd]))?"
)
EXAMPLE = "celsius@07-10, freeze@08-01:36h or scale=weather.wind_speed:1.609@07-10:7d"


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
        text += f"@{local:%Y-%m-%dT%H:%M}".removesuffix("T00:00")
        text += "" if self.amount is None else f":{self.amount!r}"
        return text + (f":{(self.end - self.start) // timedelta(hours=1)}h" if self.end else "")


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
    kind = next((kind for kind in KINDS if match and kind == match["kind"]), None)
    if match is None or kind is None:
        _refuse(text, "is no fault", f"such as {EXAMPLE}; kinds are {', '.join(KINDS)}")
    amount = float(match["late"] or match["early"] or "nan")
    low, high = AMOUNTS.get(kind, (0.0, 0.0))
    if kind not in AMOUNTS and amount == amount:
        _refuse(text, f"has the amount {amount:g}", f"none for {kind}")
    if kind in AMOUNTS and (amount == amount or kind != "timezone"):
        if not low <= amount <= high or amount == 0:
            seen = f"has the amount {amount:g}" if amount == amount else "has no amount"
            _refuse(text, seen, f"one from {low:g} to {high:g}")
    if kind == "scale" and not match["target"]:
        _refuse(text, "names no column", f"one after its kind, as in {EXAMPLE}")
    years = range(history.start.year, history.end.year + 1)
    for year in [match["year"]] if match["year"] else years:
        with suppress(ValueError):
            local = datetime.fromisoformat(f"{year}-{match['day']}T{match['time'] or '00:00'}")
            start = local.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
            hours = int(match["length"] or 0) * (24 if match["unit"] == "d" else 1)
            length = timedelta(hours=hours)
            if history.start <= start < history.end:
                return Fault(
                    kind=kind,
                    start=start,
                    end=start + length if length else None,
                    amount=amount if amount == amount else None,
                    target=match["target"],
                    zone=zone,
                )
    _refuse(text, "begins on a day that is not in the history", f"a day of {history}")


def _refuse(text: object, seen: str, expected: str) -> NoReturn:
    raise ConfigurationError(f"fault {str(text)!r} {seen}; expected {expected}. Nothing was run")


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


class _Change(NamedTuple):
    """SQL of what becomes of a table's rows inside the fault's time: new values, rows that go."""

    table: RawTable
    told: str
    new: Mapping[str, str]
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
            for ref in landed.tables:
                path = sql_text(store.path(ref.artifact))
                con.execute(
                    f"CREATE TEMP VIEW {sql_name(ref.name)} AS SELECT *, "
                    f"file_row_number AS falaj_row FROM read_parquet({path}, file_row_number=true)"
                )
            return _Planner(con, fault, config, units, landed.window).written(landed, folder)

    return store.build_once(FOLDER, key, FaultyRows, build)


def _during(fault: Fault, table: RawTable) -> str:
    moment = f"falaj_rows.{sql_name(str(table.time_column))}"
    until = f" AND {moment} < {sql_moment(fault.end)}" if fault.end else ""
    return f"({moment} >= {sql_moment(fault.start)}{until})"


class _Planner(NamedTuple):
    """Chooses what breaks; without a target by a rule that asks for nothing but the data."""

    con: duckdb.DuckDBPyConnection
    fault: Fault
    config: FeatureConfig
    units: Mapping[str, str]
    history: TimeWindow

    def written(self, landed: LandedRows, folder: StagedFolder) -> FaultyRows:
        """The landed rows with the fault in them, its table written into the folder."""
        con, fault, change = self.con, self.fault, self._planned()
        table, columns = change.table, change.table.columns
        during = _during(fault, table)
        old = {c: f"falaj_rows.{sql_name(c)}" for c in columns}
        new = {c: f"({value})::{columns[c]}" for c, value in change.new.items()}
        source = f"{sql_name(table.name)} AS falaj_rows {change.joined}"
        lost = f"coalesce({during} AND ({change.drop}), FALSE)"
        differs = " OR ".join([f"{new[c]} IS DISTINCT FROM {old[c]}" for c in new] or ["FALSE"])
        moved = f"{during} AND NOT {lost} AND ({differs})"
        sizes = "".join(
            f", avg(abs({new[c]} - {old[c]})) FILTER ({moved} AND {new[c]} <> {old[c]}) "
            f"/ nullif(stddev({old[c]}), 0)"
            for c in new
            if columns[c] in NUMBERS
        )
        counts = f"SELECT count(*) FILTER ({lost}), count(*) FILTER ({moved}){sizes} FROM {source}"
        num_lost, num_moved, *found = con.execute(counts).fetchall()[0]
        known = [size for size in found if size]
        if not num_lost + num_moved:
            _refuse(fault, "changes no row", "a time and target with rows of theirs")
        values = old | {c: f"CASE WHEN {during} THEN {new[c]} ELSE {old[c]} END" for c in new}
        selected = ", ".join(f"{value} AS {sql_name(c)}" for c, value in values.items())
        target = folder.path / f"{table.name}.parquet"
        rows = f"SELECT {selected} FROM {source} WHERE NOT {lost} ORDER BY falaj_row"
        con.execute(f"COPY ({rows}) TO {sql_text(target)} (FORMAT parquet)")
        num_rows, artifact = pq.read_metadata(target).num_rows, folder.artifact(target.name)
        ref = TableRef(name=table.name, artifact=artifact, num_rows=num_rows)
        tables = tuple(ref if each.name == ref.name else each for each in landed.tables)
        until = f"to {fault.end:%Y-%m-%d %H:%MZ}" if fault.end else "on"
        return FaultyRows(
            landed=landed.model_copy(update={"tables": tables}),
            described=f"{change.told} from {fault.start:%Y-%m-%d %H:%MZ} {until}: {num_moved:,} "
            f"rows changed, {num_lost:,} left out",
            table=table.name,
            columns=tuple(change.new),
            num_changed=num_lost + num_moved,
            size=sum(known) / len(known) if known else None,
        )

    def _planned(self) -> _Change:
        """The change of the fault's kind."""
        match self.fault.kind:
            case "celsius" | "scale":
                return self._converted()
            case "freeze":
                return self._freeze()
            case "timezone":
                return self._timezone()
            case "category-split":
                return self._split()
        return self._missing()

    def _places(self, kinds: Sequence[str], *, key: bool = False) -> list[_Place]:
        """Columns of tables with history, of these types; of the key, or not."""
        return [
            _Place(table, column)
            for table in self.config.raw_tables
            for column, kind in table.columns.items()
            if table.time_column and kind in kinds and (column in table.key) == key
        ]

    def _named(self, places: Sequence[_Place], what: str) -> list[_Place]:
        """Those that the target names: all without one."""
        found = [p for p in places if self.fault.target in (None, str(p), p.column, p.table.name)]
        if not found:
            known = ", ".join(map(str, places)) or "no such column"
            _refuse(self.fault, f"finds no {what}", f"one of {known}")
        return found

    def _converted(self) -> _Change:
        """A number times a factor; or temperatures of one table in Celsius.

        They are all that are declared in Fahrenheit, else the first called temp... Those in
        Kelvin, by their median, become Celsius too.
        """
        places, factor = self._places(NUMBERS), self.fault.amount
        if self.fault.target is None:
            declared = [p for p in places if self.units.get(str(p)) == "fahrenheit"]
            places = declared or [p for p in places if p.column.startswith("temp")][:1]
        found = self._named(places, "number" if factor else "temperature")
        table = found[0].table
        columns = [p.column for p in found if p.table == table and p.column not in CLOCK_PARTS]
        query = f"SELECT median({sql_name(columns[0])}) FROM {sql_name(table.name)}"
        kelvin = (self.con.execute(query).fetchall()[0][0] or 0) > KELVIN
        new = "{} - 273.15" if kelvin else "({} - 32) / 1.8"
        told = f"in Celsius instead of {'Kelvin' if kelvin else 'Fahrenheit'}"
        if factor:
            new, told = f"{{}} * {factor!r}", f"times {factor:g}"
        changed = {c: new.format(f"falaj_rows.{sql_name(c)}") for c in columns}
        return _Change(table, f"{', '.join(columns)} of {table.name} {told}", changed)

    def _freeze(self) -> _Change:
        """Every reading of the most regularly sampled table stays as it was last before."""
        named = [p for p in self._places(NUMBERS) if p.column not in CLOCK_PARTS]
        named = self._named(named, "number")
        table = self._most_regular([p.table for p in named])
        columns = [sql_name(p.column) for p in named if p.table == table]
        at, entity = sql_name(str(table.time_column)), _entity(table)
        last = ", ".join(f"{c} := {c}" for c in columns)
        same = [f"falaj_last.{c} IS NOT DISTINCT FROM falaj_rows.{c}" for c in entity]
        joined = (
            f"LEFT JOIN (SELECT {''.join(f'{c}, ' for c in entity)}"
            f"max_by(struct_pack({last}), {at}) AS falaj_values FROM {sql_name(table.name)} "
            f"WHERE {at} < {sql_moment(self.fault.start)} GROUP BY ALL) AS falaj_last "
            f"ON {' AND '.join(same) or 'TRUE'}"
        )
        then = "CASE WHEN falaj_values IS NULL THEN falaj_rows.{0} ELSE falaj_values.{0} END"
        new = {p.column: then.format(sql_name(p.column)) for p in named if p.table == table}
        return _Change(table, f"{table.name} repeats its last readings", new, joined=joined)

    def _timezone(self) -> _Change:
        """Times of the first table with history are off by the zone, else by an hour.

        What then lies before the fault, or after its end, is left out: it would stand there twice.
        """
        dated = [_Place(t, t.time_column) for t in self.config.raw_tables if t.time_column]
        table, column = self._named(dated, "time")[0]
        offset = self.fault.start.astimezone(ZoneInfo(self.fault.zone)).utcoffset()
        hours = self.fault.amount or (offset or timedelta(0)) / timedelta(hours=1) or 1.0
        moved = f"falaj_rows.{sql_name(column)} + to_seconds({hours * 3600:.0f})"
        end = min(self.fault.end or self.history.end, self.history.end)
        drop = f"{moved} < {sql_moment(self.fault.start)} OR {moved} >= {sql_moment(end)}"
        told = f"{column} of {table.name} is off by {hours:+g} hours"
        return _Change(table, told, {column: moved}, drop)

    def _split(self) -> _Change:
        """The most frequent value of the first category of the model arrives in other letters."""
        places = self._places(("VARCHAR",)) + self._places(("VARCHAR",), key=True)
        order = list(self.config.training_set.categorical)
        places.sort(key=lambda p: order.index(p.column) if p.column in order else len(order))
        place, value = self._value(places)
        forms = (value.lower(), value.upper(), f"{value} ", f"{value}_2")
        spelled = next(form for form in forms if not self._count(place, form))
        column = f"falaj_rows.{sql_name(place.column)}"
        new = f"CASE WHEN {column} = {sql_text(value)} THEN {sql_text(spelled)} ELSE {column} END"
        told = f"{place.column} {value!r} of {place.table.name} arrives as {spelled!r}"
        return _Change(place.table, told, {place.column: new})

    def _missing(self) -> _Change:
        """Of the most regular table, the entity with most rows; all rows where there is none."""
        table = self._most_regular([t for t in self.config.raw_tables if t.time_column])
        keys, target = self._places(("VARCHAR",), key=True), self.fault.target
        keys = [p for p in keys if target is not None or p.table == table]
        if not keys and target in (None, table.name):
            return _Change(table, f"{table.name} sends nothing", {}, "TRUE")
        place, value = self._value(keys)
        told = f"{place.table.name} has no rows of {place.column} {value!r}"
        drop = f"falaj_rows.{sql_name(place.column)} = {sql_text(value)}"
        return _Change(place.table, told, {}, drop)

    def _value(self, places: Sequence[_Place]) -> tuple[_Place, str]:
        """The place and value that the target names; of a place its most frequent value."""
        target = self.fault.target
        for place in places:
            if target is not None and self._count(place, target):
                return place, target
        place = self._named(places, "column or value")[0]
        name, table = sql_name(place.column), sql_name(place.table.name)
        found = self.con.execute(
            f"SELECT {name} FROM {table} AS falaj_rows WHERE {name} <> '' AND "
            f"{_during(self.fault, place.table)} GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT 1"
        ).fetchall()
        if not found:
            _refuse(self.fault, f"finds no value of {place}", "rows with one in its time")
        return place, str(found[0][0])

    def _count(self, place: _Place, value: str) -> int:
        query = f"SELECT count(*) FROM {sql_name(place.table.name)} WHERE {sql_name(place.column)}"
        return int(self.con.execute(f"{query} = ?", [value]).fetchall()[0][0])

    def _most_regular(self, tables: Sequence[RawTable]) -> RawTable:
        """The table in which the same time passes most often from row to row of an entity."""

        def share(table: RawTable) -> float:
            at, by = sql_name(str(table.time_column)), ", ".join(_entity(table)) or "1"
            query = (
                f"SELECT max(n) / sum(n) FROM (SELECT count(*) AS n FROM (SELECT {at} - lag({at}) "
                f"OVER (PARTITION BY {by} ORDER BY {at}) AS gap FROM {sql_name(table.name)}) "
                "WHERE gap IS NOT NULL GROUP BY gap)"
            )
            return float(self.con.execute(query).fetchall()[0][0] or 0)

        return max(tables, key=share)


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
        ends = fault.start, fault.end or snapshot.window.end
        after, before = (np.datetime64(moment.replace(tzinfo=None)) for moment in ends)
        inside = np.flatnonzero((times >= after) & (times < before))
        number = round(float(fault.amount or 0) * len(inside))
        if not number:
            _refuse(fault, f"changes none of {len(inside):,} rows", "a larger share, or more time")
        inside = inside[rows[spec.label].is_valid().to_numpy(zero_copy_only=False)[inside]]
        number = min(number, len(inside))
        rng = np.random.default_rng(int(content_key(fault)[:8], 16))
        chosen = rng.choice(inside, number, replace=False)
        labels = rows[spec.label].to_numpy(zero_copy_only=False).astype(np.float64)
        turned = np.nanmax(labels) + np.nanmin(labels) - labels
        labels[chosen] = ((labels + 1) % spec.num_labels if spec.classes else turned)[chosen]
        place = rows.column_names.index(spec.label)
        kept = pa.array(labels, from_pandas=True).cast(rows.schema.field(place).type)
        table = rows.set_column(place, rows.schema.field(place), kept)
        pq.write_table(table, folder.path / DATA_FILE, row_group_size=ROW_GROUP_ROWS)
        data, parts = folder.artifact(DATA_FILE), folder.parts(DATA_FILE)
        return snapshot.model_copy(update={"data": data, "parts": parts})

    return store.build_once(FOLDER, key, FeatureSnapshot, build)
