"""Faults put into real days, spread over the year: each is caught within its day, and named."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import duckdb
import pytest

from tasks.contracts.base import TimeWindow
from tasks.validation.baseline import DAYS as BASELINE_DAYS
from tasks.validation.diagnosis import diagnose
from tasks.validation.expectations import compile_suite, failing
from tasks.validation.subject import open_subject
from tasks.validation.suites import Suite, read_suite
from tests.support.data.tables import REPO, year_file

pytestmark = pytest.mark.slow

DAYS = {
    "a day in January": datetime(2013, 1, 16, 5, tzinfo=UTC),
    "the first day of summer time": datetime(2013, 3, 10, 5, tzinfo=UTC),
    "a hot day in July": datetime(2013, 7, 18, 4, tzinfo=UTC),
    "a Saturday in October": datetime(2013, 10, 12, 4, tzinfo=UTC),
    "Thanksgiving": datetime(2013, 11, 28, 5, tzinfo=UTC),
}
"""Midnights of New York."""


@cache
def day_file(table: str, day: str) -> Path:
    """Parquet of a raw table: of one day, or whole where it has no history."""
    if table in ("planes", "airports"):
        return year_file(table)
    start = DAYS[day]
    target = Path(mkdtemp(prefix="falaj-day-")) / f"{table}.parquet"
    with duckdb.connect() as con:
        con.execute(
            f"COPY (FROM '{year_file(table)}' WHERE time_hour >= ?::TIMESTAMPTZ AND "
            f"time_hour < ?::TIMESTAMPTZ) TO '{target}' (FORMAT parquet)",
            [start, start + timedelta(days=1)],
        )
    return target


@cache
def suite_of(table: str) -> Suite:
    return read_suite(REPO, f"raw_{table}")


def window_of(day: str) -> TimeWindow:
    return TimeWindow(start=DAYS[day], end=DAYS[day] + timedelta(days=1))


def named(table: str, day: str, change: str, folder: Path, planes: str = "FROM rows") -> str:
    """Fault that a spoiled day looks like; empty where it passes."""
    suite = suite_of(table)
    window = TimeWindow(start=DAYS[day], end=DAYS[day] + timedelta(days=1))
    path = _changed(day_file(table, day), change, folder / f"{table}.parquet")
    references = {"airports": year_file("airports")}
    references["planes"] = _changed(year_file("planes"), planes, folder / "planes-beside.parquet")
    with open_subject(path, table, suite, window) as subject:
        if faults := subject.table_faults():
            return "; ".join(faults)
        checks = compile_suite(suite, subject.derive(references))
        failed = failing([c for c in checks if c.rule.severity == "critical"], subject)
        told = [check.rule.fault for check in failed if check.rule.fault]
        for column in (check.columns[0] for check in failed if check.rule.table == BASELINE_DAYS):
            [row] = subject.query(f"SELECT {column} FROM {BASELINE_DAYS}")
            told.append(f"{column}: {row[0]}")
    if not failed:
        return ""
    return diagnose(path, table, suite, window, failed, references) or "; ".join(told)


def _changed(source: Path, change: str, target: Path) -> Path:
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        con.execute(f"CREATE VIEW rows AS FROM '{source}'")
        con.execute(f"COPY ({change}) TO '{target}' (FORMAT parquet)")
    return target


def replaced(**columns: str) -> str:
    """A query that puts expressions in the place of columns."""
    return (
        f"SELECT * REPLACE ({', '.join(f'{sql} AS {c}' for c, sql in columns.items())}) FROM rows"
    )


def shifted(column: str, order: str) -> str:
    """A query that gives each row the value of the row before it."""
    before = f"lag({column}, 1, {column}) OVER (ORDER BY {order})"
    return replaced(**{column: before})


LOCAL = "(timezone('America/New_York', time_hour) AT TIME ZONE 'UTC')"
FLIGHT_ORDER = "time_hour, minute, carrier, flight, origin"
HALF = "(hash(flight) % 2 = 0)"

SOME = "hash(flight::VARCHAR || origin || carrier) % 10"

FLIGHT_FAULTS = {
    "kilometres": (replaced(distance="round(distance * 1.609344)::BIGINT"), "kilometres instead"),
    "hours": (replaced(air_time="round(air_time / 60)::BIGINT"), "hours instead of minutes"),
    "seconds": (
        replaced(dep_delay="dep_delay * 60", arr_delay="arr_delay * 60", air_time="air_time * 60"),
        "seconds instead of minutes",
    ),
    "seconds of one delay": (replaced(arr_delay="arr_delay * 60"), "seconds instead of minutes"),
    "kilometres in half of the rows": (
        replaced(distance=f"if({HALF}, round(distance * 1.609344)::BIGINT, distance)"), "distance",
    ),
    "a frozen feed": (
        "SELECT * REPLACE (first_value(dep_delay) OVER o AS dep_delay, first_value(arr_delay) OVER "
        "o AS arr_delay, first_value(air_time) OVER o AS air_time, first_value(dep_time) OVER o AS "
        f"dep_time, first_value(arr_time) OVER o AS arr_time) FROM rows WHERE air_time IS NOT NULL "
        f"WINDOW o AS (PARTITION BY origin ORDER BY {FLIGHT_ORDER})",
        "frozen feed",
    ),
    "local time as UTC": (replaced(time_hour=LOCAL), "time zone"),
    "local columns in UTC": (
        "SELECT * REPLACE (extract(hour FROM time_hour) AS hour, extract(hour FROM time_hour) "
        "* 100 + minute AS sched_dep_time, extract(day FROM time_hour) AS day, extract(month FROM "
        "time_hour) AS month) FROM rows",
        "time zone",
    ),
    "all moved five hours": (
        "SELECT * REPLACE (time_hour - INTERVAL 5 HOURS AS time_hour, hour - 5 AS hour, "
        "sched_dep_time - 500 AS sched_dep_time) FROM rows WHERE hour >= 5",
        "time zone",
    ),
    "moved an hour": (replaced(time_hour="time_hour + INTERVAL 1 HOUR"), "clock 1 h off"),
    "a duplicated day": ("FROM rows UNION ALL FROM rows", "duplicated rows"),
    "duplicates under other ids": (
        "FROM rows UNION ALL SELECT * REPLACE (flight + 5000 AS flight) FROM rows", "duplicated",
    ),
    "a missing hour": ("FROM rows WHERE hour <> 11", "missing hour"),
    "a truncated file": ("FROM rows WHERE hour < 19", "missing hour"),
    "a new carrier": (
        replaced(carrier="if(flight % 50 = 0, 'ZZ', carrier)"), "new category in carrier",
    ),
    "a new destination": (
        replaced(dest="if(flight % 50 = 0, 'QQQ', dest)"), "new category in dest",
    ),
    "a null burst": (replaced(dep_time="if(hour = 9, NULL, dep_time)"), "null burst"),
    "a null burst in tail numbers": (replaced(tailnum="if(hour = 9, NULL, tailnum)"), "null burst"),
    "swapped delays": (
        replaced(dep_delay="arr_delay", arr_delay="dep_delay"), "swapped columns dep_delay and arr",
    ),
    "swapped ends": (replaced(origin="dest", dest="origin"), "swapped columns origin and dest"),
    "swapped measures": (
        replaced(distance="air_time", air_time="distance"), "swapped columns air_time and distance",
    ),
    "an off-by-one day": (replaced(day="day + 1"), "day added"),
    "an off-by-one day of the moment": (
        replaced(time_hour="time_hour + INTERVAL 1 DAY"), "a day off",
    ),
    "ten times": (replaced(distance="distance * 10"), "ten times too large"),
    "a flipped sign": (replaced(dep_delay="-dep_delay"), "sign flipped"),
    "a constant column": (replaced(dest="'ATL'"), "distance"),
    "rounding": (replaced(dep_delay="round(dep_delay, -1)::BIGINT"), "rounded"),
    "shifted destinations": (shifted("dest", FLIGHT_ORDER), "distance"),
    "shifted carriers": (shifted("carrier", FLIGHT_ORDER), "shifted"),
    "shifted outcomes": (shifted("arr_delay", FLIGHT_ORDER), "shifted"),
    "an airport missing": ("FROM rows WHERE origin <> 'JFK'", "airport missing"),
    "blanks": (replaced(dest="dest || ' '"), "blanks"),
    "small letters": (replaced(tailnum="lower(tailnum)"), "case"),
    "numbers as text": (replaced(air_time="air_time::VARCHAR"), "stored as text"),
    "impossible times": (replaced(dep_time="if(flight % 97 = 0, 2575, dep_time)"), "impossible"),
    "late flights dropped": (
        "FROM rows WHERE arr_delay <= 15 OR arr_delay IS NULL", "late flights missing",
    ),
    "nine in ten late flights lost": (
        f"FROM rows WHERE arr_delay <= 15 OR arr_delay IS NULL OR {SOME} = 0",
        "late flights missing",
    ),
    "three rows in ten lost": (f"FROM rows WHERE {SOME} > 2", "rows lost"),
}  # fmt: skip

# The air stands still from the noon of New York on, the wind does not.
FROM_NOON = replaced(
    **{
        n: f"if(hour < 12, {n}, max({n}) FILTER (hour = 12) OVER (PARTITION BY origin))"
        for n in ("temp", "dewp", "humid")
    }
)


def copied(origin: str, source: str) -> str:
    """A query that gives one airport the readings of another."""
    rest = f"FROM rows WHERE origin <> '{origin}'"
    return (
        f"{rest} UNION ALL SELECT * REPLACE ('{origin}' AS origin) FROM rows "
        f"WHERE origin = '{source}'"
    )


CELSIUS = {name: f"({name} - 32) / 1.8" for name in ("temp", "dewp")}
WEATHER_ORDER = "time_hour, origin"

WEATHER_FAULTS = {
    "Celsius": (replaced(**CELSIUS), "degrees Celsius instead of Fahrenheit"),
    "Celsius in one column": (
        replaced(temp=CELSIUS["temp"]), "temp: degrees Celsius instead of Fahrenheit",
    ),
    "Celsius in part of the rows": (
        replaced(**{n: f"if(origin = 'JFK', {sql}, {n})" for n, sql in CELSIUS.items()}), "unit",
    ),
    "metres a second": (
        replaced(wind_speed="wind_speed * 0.44704", wind_gust="wind_gust * 0.44704"),
        "metres a second",
    ),
    "knots": (replaced(wind_speed="wind_speed / 1.150779"), "knots instead of miles an hour"),
    "kilometres": (replaced(visib="visib * 1.609344"), "visib: kilometres instead of miles"),
    "inches of mercury": (replaced(pressure="pressure * 0.0295300"), "inches of mercury"),
    "a frozen feed": (
        "SELECT * REPLACE (first_value(temp) OVER o AS temp, first_value(dewp) OVER o AS dewp, "
        "first_value(humid) OVER o AS humid, first_value(wind_dir) OVER o AS wind_dir, "
        "first_value(wind_speed) OVER o AS wind_speed, first_value(pressure) OVER o AS pressure) "
        "FROM rows WINDOW o AS (PARTITION BY origin ORDER BY time_hour)",
        "frozen feed",
    ),
    "local time as UTC": (replaced(time_hour=LOCAL), "time zone"),
    "a duplicated day": ("FROM rows UNION ALL FROM rows", "duplicated"),
    "a missing hour": ("FROM rows WHERE hour <> 11", "missing hour"),
    "a truncated file": ("FROM rows WHERE hour < 19", "missing hour"),
    "a new airport": (
        replaced(origin="if(hour = 7, 'BOS', origin)"), "new category in origin",
    ),
    "a null burst": (replaced(temp="if(hour < 6, NULL, temp)"), "null"),
    "swapped columns": (replaced(temp="dewp", dewp="temp"), "swapped columns temp and dewp"),
    "swapped wind": (
        replaced(wind_dir="wind_speed", wind_speed="wind_dir"),
        "swapped columns wind_dir and wind_speed",
    ),
    "an off-by-one day": (replaced(day="day - 1"), "day added"),
    "ten times": (replaced(humid="humid / 10"), "humid: values ten times too small"),
    "a flipped sign": (replaced(dewp="-dewp"), "sign flipped"),
    "a constant column": (replaced(temp="max(temp) OVER ()"), "temp"),
    "rounding": (replaced(temp="round(temp)"), "temp"),
    "shifted rows": (shifted("humid", WEATHER_ORDER), "shifted"),
    "shifted temperatures": (shifted("temp", WEATHER_ORDER), "temp"),
    "an airport missing": ("FROM rows WHERE origin <> 'LGA'", "airport missing"),
    "numbers as text": (replaced(temp="temp::VARCHAR"), "stored as text"),
    "impossible values": (replaced(temp="if(hour = 3, 999, temp)"), "impossible"),
    "frozen from noon": (FROM_NOON, "frozen feed of temp, dewp and humid"),
    "a copied airport": (copied("JFK", "EWR"), "copied airport"),
    "another copied airport": (copied("LGA", "JFK"), "copied airport"),
}  # fmt: skip

REGISTER_FAULTS = {
    "planes cut short": ("planes", "FROM rows WHERE hash(tailnum) % 10 < 8", "truncated"),
    "planes out of date": ("planes", "FROM rows WHERE year < 2011 OR year IS NULL", "date"),
    "planes with blanks": ("planes", replaced(manufacturer="manufacturer || ' '"), "blanks"),
    "planes in another encoding": ("planes", replaced(model="model || 'Ã©'"), "encoding"),
    "planes in small letters": ("planes", replaced(manufacturer="lower(manufacturer)"), "manufac"),
    "planes swapped": (
        "planes", replaced(seats="engines", engines="seats"), "swapped columns engines and seats",
    ),
    "half of the airports": ("airports", "FROM rows WHERE lon < -95", "truncated file"),
    "altitudes in metres": ("airports", replaced(alt="round(alt * 0.3048)::BIGINT"), "metres"),
    "swapped coordinates": (
        "airports", replaced(lat="lon", lon="lat"), "swapped columns lat and lon",
    ),
    "longitudes without sign": ("airports", replaced(lon="-lon"), "sign flipped"),
}  # fmt: skip


@pytest.mark.parametrize("day", DAYS)
@pytest.mark.parametrize("table", ["flights", "weather"])
def test_a_clean_day_passes(table: str, day: str, tmp_path: Path) -> None:
    assert named(table, day, "FROM rows", tmp_path) == ""


FAULTS = [
    *(("flights", fault, *change) for fault, change in FLIGHT_FAULTS.items()),
    *(("weather", fault, *change) for fault, change in WEATHER_FAULTS.items()),
    *((table, fault, *change) for fault, (table, *change) in REGISTER_FAULTS.items()),
]


@pytest.mark.parametrize(
    ("table", "fault", "change", "words"),
    FAULTS,
    ids=[f"{fault[0]}: {fault[1]}" for fault in FAULTS],
)
def test_a_fault_is_named_within_its_day(
    table: str, fault: str, change: str, words: str, tmp_path: Path
) -> None:
    day = list(DAYS)[sum(map(ord, fault)) % len(DAYS)]  # all are used, and none costs much
    assert words in named(table, day, change, tmp_path)


@pytest.mark.parametrize("day", DAYS)
def test_flights_tell_that_plane_records_are_out_of_date(day: str, tmp_path: Path) -> None:
    older = "FROM rows WHERE year < 2009 OR year IS NULL"

    says = named("flights", day, "FROM rows", tmp_path, planes=older)

    assert "plane records out of date" in says
