"""Ranks, guards and drivers of real training runs are killed at random moments.

Half of `FALAJ_DRILL_MINUTES` (default 4) says for how long, `FALAJ_KILLS_SEED` which moments.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import numpy as np
import pytest

from tasks.contracts.training import TrainedModel
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tests.support.host.processes import pids_whose_command_holds, wait_until
from tests.support.ranks import training_driver
from tests.support.ranks.runs import CONFIG, losses
from tests.support.ranks.training_driver import run
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

MINUTES = float(os.environ.get("FALAJ_DRILL_MINUTES", "4")) / 2
SEED = int(os.environ.get("FALAJ_KILLS_SEED", "0"))
MAX_KILLS = 4
VICTIMS = ("driver", "guard", "rank")
GONE_WITHIN_S = 60
ATTEMPT_MARK = "--- attempt at"


@dataclass
class Drill:
    """One run that is killed a few times and then let go to its end."""

    folder: Path
    draw: random.Random
    reported: list[tuple[int, int]] = field(default_factory=list)
    """After each kill: attempts so far, and the last epoch that the driver had been told of."""
    killed: list[str] = field(default_factory=list)

    def kill_once(self) -> None:
        """Start a driver, and kill it or one of its processes somewhere on its way."""
        with self._start() as driver:
            output = cast(IO[str], driver.stdout)
            said = [output.readline() for _ in range(self.draw.randrange(4))]
            time.sleep(self.draw.uniform(0, 1.5))  # to anywhere: start, step, checkpoint, export
            self._kill(driver, self.draw.choice(VICTIMS))
            said += output.readlines()
        wait_until(lambda: not self.processes(), "every process is gone", GONE_WITHIN_S)
        epochs = [int(line.split()[1]) for line in said if line]
        self.reported.append((self._num_attempts(), max(epochs, default=-1)))

    def finish(self) -> TrainedModel:
        """Let the run go to its end."""
        model = run(self.folder)
        assert not self.processes()
        return model

    def check(self, model: TrainedModel, unbroken: TrainedModel) -> None:
        """The result is that of an unbroken run, and nothing that was done was done again."""
        np.testing.assert_allclose(losses(model.epochs), losses(unbroken.epochs), rtol=1e-6)
        assert model.best_epoch == unbroken.best_epoch
        log = ArtifactStore(self.folder / "store").path(model.log).read_text()
        attempts = log.split(ATTEMPT_MARK)[1:]
        for num_attempts, last_reported in self.reported:
            for attempt in attempts[num_attempts:]:
                done = re.findall(r"rank 0 \| DEBUG epoch (\d+): train", attempt)
                assert all(int(epoch) > last_reported for epoch in done), (done, last_reported)

    def processes(self) -> list[int]:
        """All processes of the run; each has the folder in its command line."""
        own = os.getpid()
        return [pid for pid in pids_whose_command_holds(str(self.folder)) if pid != own]

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", training_driver.__name__, str(self.folder)],
            cwd=PROJECT_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _kill(self, driver: subprocess.Popen[str], kind: str) -> None:
        guards = [pid for pid in self.processes() if b"guard.py" in _command_of(pid)]
        ranks = [pid for pid in self.processes() if pid not in {driver.pid, *guards}]
        found = {"driver": [driver.pid], "guard": guards, "rank": ranks}[kind]
        victim = self.draw.choice(found or [driver.pid])
        self.killed.append(kind if found else "driver")
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            self.killed[-1] += " (had ended)"

    def _num_attempts(self) -> int:
        logs = list(self.folder.glob("work/*/training.log"))
        return sum(log.read_text().count(ATTEMPT_MARK) for log in logs)


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@proves(Promise.INTERRUPT, "the losses of an unbroken run; no epoch done twice")
def test_a_run_that_is_killed_again_and_again_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    unbroken = run(tmp_path / "unbroken")
    assert len(unbroken.epochs) == CONFIG.max_epochs
    ends_at = time.monotonic() + 60 * MINUTES
    num_runs = 0
    while time.monotonic() < ends_at or not num_runs:
        drill = Drill(tmp_path / f"run-{num_runs}", draw)
        for _ in range(draw.randrange(1, MAX_KILLS + 1)):
            drill.kill_once()
        drill.check(drill.finish(), unbroken)
        sys.stdout.write(f"killed {', '.join(drill.killed)}; told {drill.reported}\n")
        num_runs += 1
