"""Long runs of tests resume after an interruption."""

import os
import re
import subprocess
from pathlib import Path

from tests.support.host.processes import run_python

CONFTEST = """
from tests.support.suite import resume
pytest_addoption = resume.add_options
pytest_configure = resume.install
"""
TESTS = """
import os, pytest

def test_that_passes():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_that_ends_the_run(number):
    if number == 2 and os.environ.get("KILLED"):
        os.kill(os.getpid(), 9)

def test_that_fails_at_first():
    assert not os.environ.get("FAILS")
"""


def run(folder: Path, **environment: str) -> dict[str, int]:
    """How many tests passed, failed and were left out."""
    words = ("-m", "pytest", "-q", "--resume")
    done = run_python(*words, cwd=folder, env={**os.environ, **environment})
    return {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", done.stdout)[-4:]}


def test_a_killed_run_resumes_on_the_same_sources_and_a_complete_one_begins_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "."]):
        subprocess.run([*git, *words], check=True)
    run(tmp_path, KILLED="yes")
    seen = run(tmp_path, FAILS="yes")
    assert (seen["passed"], seen["failed"], seen["deselected"]) == (1, 1, 2)
    (tmp_path / "test_it.py").write_text(TESTS + "# changed\n")
    assert run(tmp_path)["passed"] == 4
    (tmp_path / "test_it.py").write_text(TESTS)
    assert run(tmp_path)["deselected"] == 3
    assert run(tmp_path)["passed"] == 4
