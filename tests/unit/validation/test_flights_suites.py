"""The suites of the flights use case: clean rows pass, and each fault is called by its name."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tasks.contracts.data import ValidationResult
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.expectations import compile_suite
from tasks.validation.runner import validate_table
from tasks.validation.subject import open_subject
from tasks.validation.suites import FOLDER, read_suite
from tests.support.data.tables import REPO, WEEK, real_table

SUITES = sorted(path.stem for path in (REPO / FOLDER).glob("*.yaml"))
DTYPES = {
    "text": "string",
    "integer": "int64",
    "number": "float32",
    "boolean": "bool",
    "timestamp": "datetime64[us, UTC]",
}


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_file_parses_and_its_sql_and_expectations_are_sound(
    tmp_path: Path, name: str
) -> None:
    checked = read_suite(REPO, name)
    columns = {name: DTYPES[kind] for kind, names in checked.columns.items() for name in names}
    empty = pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in columns.items()})
    empty.to_parquet(tmp_path / "table.parquet", index=False)

    with open_subject(tmp_path / "table.parquet", name, checked, WEEK) as subject:
        checks = compile_suite(checked, subject.derive())

    assert len(checks) >= len(checked.expectations)


def validate(store: ArtifactStore, table: str, change: str = "FROM rows") -> ValidationResult:
    checked = read_suite(REPO, f"raw_{table}")
    return validate_table(real_table(store, table, change), checked, WEEK, store, "Nothing")


@pytest.mark.parametrize("table", ["flights", "weather", "planes", "airports"])
def test_clean_rows_pass(store: ArtifactStore, table: str) -> None:
    result = validate(store, table)

    assert result.warnings == ()
    assert result.num_expectations >= len(read_suite(REPO, f"raw_{table}").expectations) - 2


def test_a_fault_is_called_by_its_name(store: ArtifactStore) -> None:
    celsius = "SELECT * REPLACE ((temp - 32) / 1.8 AS temp, (dewp - 32) / 1.8 AS dewp) FROM rows"
    with pytest.raises(DataContractError, match="humidity_gap has"):
        validate(store, "weather", celsius)
