"""Long runs of tests resume after an interruption, and end with a table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.kernel.settings import PROJECT_ROOT

CONFTEST = """
from tests.support.suite import resume
pytest_addoption = resume.add_options
pytest_configure = resume.install
"""
TESTS = """
import os, pytest

pytestmark = pytest.mark.slow

def test_that_passes():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_that_ends_the_run(number):
    if number == 2 and os.environ.get("KILLED"):
        os.kill(os.getpid(), 9)

def test_that_fails_at_first():
    assert not os.environ.get("FAILS")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / ".gitignore").write_text(".pytest_cache\n__pycache__\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    subprocess.run(["git", "-C", tmp_path, "add", "--all"], check=True)
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "--quiet", "-m", "."], check=True)
    return tmp_path


def run(folder: Path, *options: str, **environment: str) -> tuple[int, str]:
    """The exit code, and how many ran and passed, were left out, and stand in the table."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--resume", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def counts(said: str) -> dict[str, int]:
    (row,) = re.findall(r"^ *(\d+) +(\d+) +(\d+) +\d+ +(\d+)  all$", said, re.MULTILINE)
    return dict(zip(("passed", "failed", "skipped", "earlier"), map(int, row), strict=True))


def test_a_killed_run_resumes_and_a_complete_one_begins_again(folder: Path) -> None:
    code, _ = run(folder, KILLED="yes")
    assert code == -9
    code, said = run(folder, FAILS="yes")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert counts(said) == {"passed": 3, "failed": 1, "skipped": 0, "earlier": 2}
    code, said = run(folder)
    assert code == 0
    assert counts(said) == {"passed": 4, "failed": 0, "skipped": 0, "earlier": 3}
    code, said = run(folder)
    assert counts(said)["earlier"] == 0


@pytest.mark.slow
def test_what_passed_on_other_sources_does_not_count(folder: Path) -> None:
    run(folder, FAILS="yes")
    (folder / "test_it.py").write_text(TESTS + "\n# changed\n")
    code, said = run(folder)
    assert code == 0
    assert counts(said)["earlier"] == 0


def test_a_restart_forgets_what_passed(folder: Path) -> None:
    run(folder, FAILS="yes")
    assert counts(run(folder, "--restart")[1])["earlier"] == 0
