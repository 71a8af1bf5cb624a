"""Each promise and each complaint has a drill, and each drill says what it proves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.settings import PROJECT_ROOT
from tests.support.suite.drill_table import FOLDER
from tests.support.suite.promises import Promise

pytestmark = pytest.mark.timeout(600)

OUTCOMES = """
import pytest
from tests.support.suite.drill_table import install
from tests.support.suite.promises import Promise, proves

@proves(Promise.INTERRUPT, "a | whole")
@proves(Promise.NO_ORPHANS, "nobody left")
@pytest.mark.drill
@pytest.mark.parametrize("number", [1, 2])
def test_two_parameters_of_which_one_fails(number, record_property):
    record_property("trials", 5)
    assert number == 1

@proves(Promise.FULL_DISK, "a sentence")
@pytest.mark.drill
def test_that_cannot_run_here():
    pytest.skip("no disk")

@proves(Promise.TRACED, "digests")
def test_that_make_test_runs():
    pass

@proves(Promise.EVICTION, "goes on")
@pytest.mark.slow
def test_that_make_test_slow_runs():
    pass
"""


def pytest_with(*arguments: str, report: Path, cwd: Path = PROJECT_ROOT) -> str:
    """What a pytest of its own says, without this project's plugins but the table."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=cwd,
        env={**os.environ, FOLDER: str(report), "PYTHONPATH": str(PROJECT_ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def rows_in(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "drills.json").read_text())
    return found


def test_no_promise_and_no_complaint_is_without_a_drill(tmp_path: Path) -> None:
    """A drill of `make drills`, or a test of `make test` or `make test-slow` that does the same."""
    tests = {file: file.read_text() for file in (PROJECT_ROOT / "tests").rglob("test_*.py")}
    tests.pop(Path(__file__))
    files = [str(f) for f, text in tests.items() if "@proves(" in text or "mark.drill" in text]
    said = pytest_with("--collect-only", "-m", "", *sorted(files), report=tmp_path)
    rows = rows_in(tmp_path)
    assert {row["promise"] for row in rows} == {promise.value for promise in Promise}
    assert all(row["end_state"] for row in rows)
    told = {row["drill"] for row in rows}
    in_drills = {line.partition("[")[0] for line in said.splitlines() if "tests/drills/" in line}
    assert {line.removeprefix("tests/") for line in in_drills} <= told, "a drill proves nothing"


def test_the_table_tells_the_worst_of_each_drill_and_what_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests import drill_table\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'drill: breaks things')\n"
        "    config.addinivalue_line('markers', 'slow: takes its time')\n"
        "    drill_table.install(config)\n"
    )
    (tmp_path / "test_it.py").write_text(OUTCOMES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    said = pytest_with("-m", "drill", report=tmp_path / "report", cwd=tmp_path)
    rows = {row["promise"]: row for row in rows_in(tmp_path / "report")}
    assert [row["result"] for row in rows.values()] == [
        "failed",
        "failed",
        "in make test",
        "in make test-slow",
        "skipped",
    ]
    assert rows[Promise.INTERRUPT]["trials"] == 10
    assert "promises and their drills" in said
    table = (tmp_path / "report" / "drills.md").read_text().splitlines()
    assert table[0].startswith("| promise or complaint | drill |")
    assert all(line.replace("\\|", "").count("|") == 7 for line in table)

    said = pytest_with("-m", "not drill", report=tmp_path / "quiet", cwd=tmp_path)
    assert "promises and their drills" not in said
    results = {row["promise"]: row["result"] for row in rows_in(tmp_path / "quiet")}
    assert (results[Promise.INTERRUPT], results[Promise.TRACED]) == ("not run", "passed")
