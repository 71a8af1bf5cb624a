"""Ranks, their guards, the process they are forked from and the driver are killed at random.

For half of `FALAJ_DRILL_MINUTES` (default 4), from the seed `FALAJ_DRILL_SEED` (default 0): each
time one process of a living job is killed -9 at a random moment, while it imports too, and nothing
of the job may be left some seconds later.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until
from tests.support.ranks.rank_programs import GONE_WITHIN_S
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

MINUTES = float(os.environ.get("FALAJ_DRILL_MINUTES", "4")) / 2
SEED = int(os.environ.get("FALAJ_DRILL_SEED", "0"))
# The driver, a guard, what ranks are forked from, and a guard and a rank twice.
NUM_PROCESSES = 7
UP_WITHIN_S = 240


def living(driver: psutil.Process) -> list[psutil.Process]:
    """The driver and all that it has started, directly or not."""
    try:
        return [driver, *driver.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_one_at_a_random_moment(folder: Path, rng: random.Random) -> str:
    """Start a job, kill one of its processes; returns which, once nothing of the job is left."""
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks.rank_programs", str(folder)],
            cwd=PROJECT_ROOT,
            stdout=log,
            stderr=log,
        )
    driver = psutil.Process(started.pid)
    try:
        stage = rng.randint(1, NUM_PROCESSES)
        wait_until(lambda: len(living(driver)) >= stage, f"{stage} are up", UP_WITHIN_S)
        time.sleep(rng.uniform(0, 0.5))
        seen = set(living(driver))
        victim = rng.choice(sorted(seen, key=lambda process: process.pid))
        what = f"{victim.name()}, one of {len(seen)}"
        victim.kill()
        time.sleep(rng.uniform(0, 0.5))
        seen.update(living(driver))
        driver.kill()  # it does not look for a rank's end
        started.wait()
        wait_until(lambda: not any(map(is_left, seen)), f"all are gone after {what}", GONE_WITHIN_S)
    finally:
        started.kill()
        started.wait()
    return what


def is_left(process: psutil.Process) -> bool:
    """True while that very process lives, not another that got its number."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@proves(Promise.NO_ORPHANS, "no process is left, whichever was killed")
def test_nothing_of_a_job_outlives_any_of_its_processes(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    end = time.monotonic() + 60 * MINUTES
    number = 0
    while time.monotonic() < end:
        folder = tmp_path / str(number)
        folder.mkdir()
        killed = kill_one_at_a_random_moment(folder, rng)
        sys.stdout.write(f"{number}: {killed}, was killed; nothing is left\n")
        number += 1
    assert number > 0
