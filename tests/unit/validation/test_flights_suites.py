"""The suites of the flights use case: clean rows pass, and each fault is called by its name."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import yaml

from tasks.contracts.data import TableRef
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.expectations import compile_suite
from tasks.validation.outcome import read_outcome
from tasks.validation.runner import validate_table
from tasks.validation.subject import open_subject
from tasks.validation.suites import FOLDER, Suite, read_suite
from tests.support.data.tables import REPO, WEEK, real_table

SUITES = sorted(path.stem for path in (REPO / FOLDER).glob("*.yaml"))
ARROW_DTYPES = {
    "text": "string",
    "integer": "int64",
    "number": "float32",
    "boolean": "bool",
    "timestamp": "datetime64[us, UTC]",
}


def empty_table(checked: Suite) -> pd.DataFrame:
    """A table without rows and with the columns that a suite declares."""
    return pd.DataFrame(
        {
            name: pd.Series(dtype=ARROW_DTYPES[kind])
            for kind, names in checked.columns.items()
            for name in names
        }
    )


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_file_parses_and_its_sql_and_expectations_are_sound(
    tmp_path: Path, name: str
) -> None:
    checked = read_suite(REPO, name)
    empty_table(checked).to_parquet(tmp_path / "table.parquet", index=False)

    with open_subject(tmp_path / "table.parquet", name, checked, WEEK) as subject:
        checks = compile_suite(checked, subject.derive())

    assert len(checks) >= len(checked.expectations)


def test_every_suite_that_the_use_case_names_exists_and_fits_its_columns() -> None:
    features = yaml.safe_load((REPO / "use_case.yaml").read_text())["features"]
    named = [t["suite"] for t in (*features["raw_tables"], *features["feature_tables"])]

    assert {*named, features["training_set"]["suite"]} == set(SUITES)
    for table in features["raw_tables"]:
        declared = read_suite(REPO, table["suite"]).columns.values()
        assert {name for names in declared for name in names} == set(table["columns"])


def refusal(table: TableRef, store: ArtifactStore) -> str:
    with pytest.raises(DataContractError) as caught:
        validate_table(table, read_suite(REPO, f"raw_{table.name}"), WEEK, store, "Nothing")
    return str(caught.value)


@pytest.mark.parametrize("table", ["flights", "weather", "planes", "airports"])
def test_clean_rows_pass(store: ArtifactStore, table: str) -> None:
    checked = read_suite(REPO, f"raw_{table}")

    result = validate_table(real_table(store, table), checked, WEEK, store, "Nothing")

    outcome = read_outcome(store.path(result.result))
    assert [check.sentence for check in outcome.with_status("warned")] == []
    assert outcome.num_judged >= len(checked.expectations) - 2


FAULTS = {
    "duplicated keys": (
        "flights",
        "FROM rows UNION ALL (FROM rows ORDER BY time_hour LIMIT 7)",
        "(time_hour, carrier, flight, origin) repeats in 14 rows",
    ),
    "a date that does not exist": (
        "flights",
        "SELECT * REPLACE (13 AS month) FROM rows",
        "hours_off_local_clock has",
    ),
    "rows of another window": (
        "flights",
        "SELECT * REPLACE (time_hour + INTERVAL 7 DAYS AS time_hour, day + 7 AS day) FROM rows",
        "outside_window is true in",
    ),
    "a new carrier": (
        "flights",
        "SELECT * REPLACE (CASE WHEN flight = 1545 THEN 'ZZ' ELSE carrier END AS carrier) "
        "FROM rows",
        "'YV', for example 'ZZ' (a carrier is one of the sixteen known airlines)",
    ),
    "a burst of nulls in all outcomes": (
        "flights",
        "SELECT * REPLACE (CASE WHEN day = 5 THEN NULL ELSE dep_time END AS dep_time, "
        "CASE WHEN day = 5 THEN NULL ELSE dep_delay END AS dep_delay, "
        "CASE WHEN day = 5 THEN NULL ELSE arr_time END AS arr_time, "
        "CASE WHEN day = 5 THEN NULL ELSE arr_delay END AS arr_delay, "
        "CASE WHEN day = 5 THEN NULL ELSE air_time END AS air_time) FROM rows",
        "cancelled_share has 1 value above 0.85, for example 1 (day_start '2013-03-05T05:00:00",
    ),
    "lost tail numbers": (
        "flights",
        "SELECT * REPLACE (NULL::TEXT AS tailnum) FROM rows",
        "flown_without_tail_number is true in",
    ),
    "a feed that stopped": (
        "flights",
        "FROM rows WHERE time_hour < TIMESTAMPTZ '2013-03-10 15:00:00+00'",
        "longest_silence_hours has 1 value above 11, for example 15",
    ),
    "an airport that fell silent": (
        "flights",
        "FROM rows WHERE NOT (origin = 'JFK' AND day = 6)",
        "origins has 1 value other than 3, for example 2 (day_start '2013-03-06T05:00",
    ),
    "Celsius instead of Fahrenheit": (
        "weather",
        "SELECT * REPLACE ((temp - 32) / 1.8 AS temp, (dewp - 32) / 1.8 AS dewp) FROM rows",
        "humidity_gap has",
    ),
    "a frozen station": (
        "weather",
        "SELECT * EXCLUDE (frozen) REPLACE (CASE WHEN frozen THEN 50 ELSE temp END AS temp, "
        "CASE WHEN frozen THEN 40 ELSE dewp END AS dewp, "
        "CASE WHEN frozen THEN 68.5 ELSE humid END AS humid, "
        "CASE WHEN frozen THEN 90 ELSE wind_dir END AS wind_dir, "
        "CASE WHEN frozen THEN 8.05546 ELSE wind_speed END AS wind_speed, "
        "CASE WHEN frozen THEN 1012 ELSE pressure END AS pressure) "
        "FROM (SELECT *, origin = 'LGA' AND day = 6 AS frozen FROM rows)",
        "longest_unchanged_hours has 1 value above 4, for example 24 (origin 'LGA')",
    ),
    "a burst of nulls in the weather": (
        "weather",
        "SELECT * REPLACE (CASE WHEN day = 5 THEN NULL ELSE visib END AS visib) FROM rows",
        "visib has 70 nulls in 502 rows (tolerated share 0.1)",
    ),
    "an unknown kind of engine": (
        "planes",
        "SELECT * REPLACE (CASE WHEN seats = 2 THEN 'Warp drive' ELSE engine END AS engine) "
        "FROM rows",
        "for example 'Warp drive'",
    ),
    "a time zone that nobody can compute": (
        "airports",
        "SELECT * REPLACE (CASE WHEN faa = 'LAX' THEN 'America/Hollywood' ELSE tzone END "
        "AS tzone) FROM rows",
        "unknown_time_zone is true in 1 row",
    ),
}


QUICK_FAULTS = ("Celsius instead of Fahrenheit", "a new carrier", "duplicated keys")


@pytest.mark.parametrize(
    "fault",
    [*QUICK_FAULTS]
    + [pytest.param(f, marks=pytest.mark.slow) for f in FAULTS if f not in QUICK_FAULTS],
)
def test_a_fault_is_called_by_its_name(store: ArtifactStore, fault: str) -> None:
    table, change, words = FAULTS[fault]

    message = refusal(real_table(store, table, change), store)

    assert words in message


@pytest.mark.slow
def test_one_broken_reading_is_a_warning_and_many_are_a_fault(store: ArtifactStore) -> None:
    gale = (
        "SELECT * REPLACE (CASE WHEN {} THEN 1048.36 ELSE wind_speed END AS wind_speed) FROM rows"
    )
    checked = read_suite(REPO, "raw_weather")
    one = real_table(store, "weather", gale.format("origin = 'EWR' AND day = 6 AND hour = 8"))

    result = validate_table(one, checked, WEEK, store, "Nothing")

    [warning] = read_outcome(store.path(result.result)).with_status("warned")
    assert "1048.36 (origin 'EWR', time_hour '2013-03-06T13:00:00+00:00')" in warning.sentence
    many = real_table(store, "weather", gale.format("day = 6"))
    assert "wind_speed has 72 values outside 0 to 120 (tolerated share 0.05)" in refusal(
        many, store
    )
