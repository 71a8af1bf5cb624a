"""The machine's clock jumps by hours, ahead and back, while things run that go by it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.decision import Evidence
from tasks.control.retraining.ledger import Ledger
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.control import builders
from tests.support.host.clocks import Clock, make_clock
from tests.support.host.processes import wait_patiently
from tests.support.platform import platform_schedule
from tests.support.platform.commands import Platform
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

CAUTIOUS = RetrainingPolicy(cool_down_hours=6)
JUMPS = {
    "ahead": (10,),
    "back and right again": (-10, 0),
    "years ahead and right again": (24 * 365 * 10, 0),
}


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    folder = tmp_path / "clock"
    folder.mkdir()
    return make_clock(folder)


class ControlledByClock:
    """The controller of one model, in processes that go by a clock of their own."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.url, self.runs, self._clock = (
            f"sqlite:///{folder / 'operation.db'}",
            folder / "runs",
            clock,
        )
        self.runs.mkdir()

    def judge(self, seen: Evidence) -> None:
        Ledger(self.url).store_result(builders.MODEL, builders.USE_CASE, seen, CAUTIOUS)

    def sweep(self) -> int:
        """Answer all; returns how many runs there are."""
        command = [sys.executable, "-m", "tests.support.control.controller_process"]
        subprocess.run(
            [*command, self.url, str(self.runs), "sweep"],
            cwd=PROJECT_ROOT,
            env={**os.environ, **self._clock.environment},
            check=True,
        )
        return len(list(self.runs.iterdir()))


@proves(Promise.CLOCK_JUMP, "the second incident waits as long as it should")
@pytest.mark.parametrize("jumps", JUMPS.values(), ids=JUMPS.keys())
def test_a_cool_down_holds_whatever_the_clock_says(
    tmp_path: Path, clock: Clock, jumps: tuple[float, ...]
) -> None:
    controller = ControlledByClock(tmp_path, clock)
    controller.judge(builders.stale(0))
    assert controller.sweep() == 1
    controller.judge(builders.stable(1))
    controller.judge(builders.stale(2))
    for hours in jumps:
        clock.jump_to(hours)
        assert [controller.sweep() for _ in range(2)] == [1, 1]


@proves(Promise.CLOCK_JUMP, "schedules go on within minutes; doctor finds no problem")
def test_schedules_of_a_platform_go_on_after_a_jump(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    platform = Platform(tmp_path / "home", ("--deploying", platform_schedule.__name__))
    try:
        code, said = platform.up()
        assert code == 0, said
        wait_patiently(lambda: runs(platform, "COMPLETED"), "a first run")
        for hours in (-3, 0):
            clock.jump_to(hours)
            known = runs(platform)
            wait_patiently(
                lambda: len(runs(platform, "COMPLETED") - known) >= 2,  # noqa: B023
                f"runs that were planned since the clock is at {hours:+} h",
            )
        platform.until_well()
        code, said = platform.run("doctor")
        assert "PROBLEM" not in said
    finally:
        platform.end()


def runs(platform: Platform, state: str = "%") -> set[str]:
    """Ids of the scheduled flow's runs in a state, by the database."""
    with closing(sqlite3.connect(platform.files.prefect / "prefect.db", timeout=60)) as database:
        found = database.execute(
            "SELECT run.id FROM flow_run AS run JOIN flow ON flow.id = run.flow_id "
            "WHERE flow.name = 'each-minute' AND run.state_type LIKE ?",
            [state],
        )
        return {run for (run,) in found}
