"""A replay that is killed goes on where it was, and ends as if nobody had killed it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.kernel.settings import PROJECT_ROOT

PROGRAM = [sys.executable, "-m", "tests.support.replay.walking"]


def walked(home: Path) -> str:
    done = subprocess.run(
        [*PROGRAM, str(home)], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def num_checks(home: Path) -> int:
    folder = home / "artifacts" / "replayed-checks"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_walk_killed_twice_ends_as_one_that_was_not(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for wanted in (5, 20):
        process = subprocess.Popen(
            [*PROGRAM, str(killed)], cwd=PROJECT_ROOT, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 240
        while num_checks(killed) < wanted and process.poll() is None:
            assert time.monotonic() < deadline, f"{num_checks(killed)} checks of {wanted}"
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    kept = num_checks(killed)
    assert walked(killed) == walked(whole)
    assert num_checks(killed) > kept
