"""Each promise and each complaint has a drill, and each drill says what it proves."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.kernel.settings import PROJECT_ROOT
from tests.support.suite.drill_table import FOLDER
from tests.support.suite.promises import Promise

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


def proofs(file: Path) -> dict[str, list[ast.expr]]:
    """Decorators by function of a test module; those of the whole module count for each."""
    text = file.read_text()
    if "@proves(" not in text and "mark.drill" not in text:
        return {}
    tree = ast.parse(text)
    marks = [
        value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for value in (node.value.elts if isinstance(node.value, ast.List) else [node.value])
    ]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        f"{file.name}::{function.name}": [*marks, *function.decorator_list]
        for function in functions
        if function.name.startswith("test_")
    }


def test_no_promise_and_no_complaint_is_without_a_drill() -> None:
    """A drill of `make drills`, or a test of `make test` or `make test-slow` that does the same."""
    proved, drills_that_prove_nothing = set(), []
    for file in (PROJECT_ROOT / "tests").rglob("test_*.py"):
        for name, decorators in proofs(file).items():
            calls = [d for d in decorators if ast.unparse(d).startswith("proves(")]
            for call in calls:
                assert isinstance(call, ast.Call)
                promise, end_state = call.args
                proved.add(Promise[ast.unparse(promise).removeprefix("Promise.")])
                assert ast.unparse(end_state).strip("'\""), name
            is_drill = any(ast.unparse(d).startswith("pytest.mark.drill") for d in decorators)
            if is_drill and not calls:
                drills_that_prove_nothing.append(name)
    assert proved == set(Promise)
    assert not drills_that_prove_nothing


def test_the_table_tells_the_worst_of_each_drill_and_what_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support.suite import drill_table\n"
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
