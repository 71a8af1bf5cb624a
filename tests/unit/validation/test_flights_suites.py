"""The suites of the flights use case: clean rows pass, and each fault is called by its name."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

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
    "a new carrier": (
        "flights",
        "SELECT * REPLACE (CASE WHEN flight = 1545 THEN 'ZZ' ELSE carrier END AS carrier) "
        "FROM rows",
        "'YV', for example 'ZZ' (a carrier is one of the sixteen known airlines)",
    ),
    "Celsius instead of Fahrenheit": (
        "weather",
        "SELECT * REPLACE ((temp - 32) / 1.8 AS temp, (dewp - 32) / 1.8 AS dewp) FROM rows",
        "humidity_gap has",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_called_by_its_name(store: ArtifactStore, fault: str) -> None:
    table, change, words = FAULTS[fault]

    message = refusal(real_table(store, table, change), store)

    assert words in message
