"""A replay that is killed goes on where it was, and ends as if nobody had killed it."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.host.processes import python, run_python, wait_until

PROGRAM = ("-m", "tests.support.replay.walking")


def walked(home: Path) -> str:
    return run_python(*PROGRAM, str(home), check=True, timeout=None).stdout


def num_checks(home: Path) -> int:
    folder = home / "artifacts" / "replayed-checks"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_walk_killed_twice_ends_as_one_that_was_not(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for wanted in (5, 20):
        with python(*PROGRAM, str(killed), stdout=subprocess.DEVNULL) as process:
            wait_until(
                lambda: num_checks(killed) >= wanted or process.poll() is not None,  # noqa: B023
                f"{wanted} checks",
                240,
            )
            process.kill()
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    kept = num_checks(killed)
    assert walked(killed) == walked(whole)
    assert num_checks(killed) > kept
