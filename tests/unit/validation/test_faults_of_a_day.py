"""Faults put into real days, spread over the year: each is caught within its day, and named."""

from datetime import UTC, datetime, timedelta

import pytest

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.runner import validate_table
from tasks.validation.suites import read_suite
from tests.support.data.tables import REPO, part_of_year, spoiled, year_file

pytestmark = pytest.mark.slow

DAYS = {
    "a day in January": datetime(2013, 1, 16, 5, tzinfo=UTC),
    "the first day of summer time": datetime(2013, 3, 10, 5, tzinfo=UTC),
    "a hot day in July": datetime(2013, 7, 18, 4, tzinfo=UTC),
    "a Saturday in October": datetime(2013, 10, 12, 4, tzinfo=UTC),
    "Thanksgiving": datetime(2013, 11, 28, 5, tzinfo=UTC),
}
"""Midnights of New York."""


def refusal(
    store: ArtifactStore, table: str, day: str, change: str, planes: str = "FROM rows"
) -> str:
    """Why a spoiled day is refused; empty where it passes."""
    window = TimeWindow(start=DAYS[day], end=DAYS[day] + timedelta(days=1))
    file = part_of_year(table, window.start, window.end)
    others = {
        "airports": spoiled(store, "airports", year_file("airports"), "FROM rows"),
        "planes": spoiled(store, "planes", year_file("planes"), planes),
    }
    rows = spoiled(store, table, file, change)
    suite = read_suite(REPO, f"raw_{table}")
    try:
        validate_table(rows, suite, window, store, "Nothing", references=others)
    except DataContractError as exc:
        return str(exc)
    return ""


def replaced(**columns: str) -> str:
    """A query that puts expressions in the place of columns."""
    return (
        f"SELECT * REPLACE ({', '.join(f'{sql} AS {c}' for c, sql in columns.items())}) FROM rows"
    )


def shifted(column: str, order: str) -> str:
    """A query that gives each row the value of the row before it."""
    return replaced(**{column: f"lag({column}, 1, {column}) OVER (ORDER BY {order})"})


LOCAL = "(timezone('America/New_York', time_hour) AT TIME ZONE 'UTC')"
FLIGHT_ORDER = "time_hour, minute, carrier, flight, origin"

FLIGHT_FAULTS = {
    "a frozen feed": (
        "SELECT * REPLACE (first_value(dep_delay) OVER o AS dep_delay, first_value(arr_delay) OVER "
        "o AS arr_delay, first_value(air_time) OVER o AS air_time, first_value(dep_time) OVER o AS "
        f"dep_time, first_value(arr_time) OVER o AS arr_time) FROM rows WHERE air_time IS NOT NULL "
        f"WINDOW o AS (PARTITION BY origin ORDER BY {FLIGHT_ORDER})",
        "frozen feed",
    ),
    "local time as UTC": (replaced(time_hour=LOCAL), "time zone"),
    "a duplicated day": ("FROM rows UNION ALL FROM rows", "duplicated rows"),
    "a missing hour": ("FROM rows WHERE hour <> 11", "missing hour"),
    "a new carrier": (
        replaced(carrier="if(flight % 50 = 0, 'ZZ', carrier)"), "new category in carrier",
    ),
    "a null burst": (replaced(dep_time="if(hour = 9, NULL, dep_time)"), "null burst"),
    "an off-by-one day": (replaced(day="day + 1"), "day added"),
    "a flipped sign": (replaced(dep_delay="-dep_delay"), "sign"),
    "a constant column": (replaced(dest="'ATL'"), "distance"),
    "numbers as text": (replaced(air_time="air_time::VARCHAR"), "VARCHAR, expected"),
    "rounding": (replaced(dep_delay="round(dep_delay, -1)::BIGINT"), "rounded"),
    "blanks": (replaced(dest="dest || ' '"), "blanks"),
    "shifted outcomes": (shifted("arr_delay", FLIGHT_ORDER), "shifted"),
    "impossible times": (replaced(dep_time="if(flight % 97 = 0, 2575, dep_time)"), "impossible"),
    "late flights dropped": (
        "FROM rows WHERE arr_delay <= 15 OR arr_delay IS NULL", "late flights missing",
    ),
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

WEATHER_FAULTS = {
    "Celsius": (replaced(**CELSIUS), "change of unit"),
    "Celsius in part of the rows": (
        replaced(**{n: f"if(origin = 'JFK', {sql}, {n})" for n, sql in CELSIUS.items()}), "unit",
    ),
    "change of unit in wind_speed": (
        replaced(wind_speed="wind_speed * 0.44704", wind_gust="wind_gust * 0.44704"),
        "change of unit in wind_speed",
    ),
    "a null burst": (replaced(temp="if(hour < 6, NULL, temp)"), "null"),
    "a flipped sign": (replaced(dewp="-dewp"), "change of unit"),
    "swapped columns": (replaced(temp="dewp", dewp="temp"), "swapped columns"),
    "frozen from noon": (FROM_NOON, "frozen feed of temp, dewp and humid"),
    "a copied airport": (copied("JFK", "EWR"), "copied airport"),
}  # fmt: skip

REGISTER_FAULTS = {
    "planes cut short": ("planes", "FROM rows WHERE hash(tailnum) % 10 < 8", "truncated"),
    "altitudes in metres": (
        "airports", replaced(alt="round(alt * 0.3048)::BIGINT"), "change of unit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("day", DAYS)
@pytest.mark.parametrize("table", ["flights", "weather"])
def test_a_clean_day_passes(store: ArtifactStore, table: str, day: str) -> None:
    assert refusal(store, table, day, "FROM rows") == ""


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
def test_a_fault_is_refused_within_its_day(
    store: ArtifactStore, table: str, fault: str, change: str, words: str
) -> None:
    assert words in refusal(store, table, list(DAYS)[sum(map(ord, fault)) % len(DAYS)], change)


@pytest.mark.parametrize("day", DAYS)
def test_flights_tell_that_plane_records_are_out_of_date(store: ArtifactStore, day: str) -> None:
    older = "FROM rows WHERE year < 2009 OR year IS NULL"

    assert "plane records out of date" in refusal(store, "flights", day, "FROM rows", planes=older)
