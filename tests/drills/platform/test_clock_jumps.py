"""The machine's clock jumps by hours, ahead and back, while things run that go by it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.host.clocks import Clock, make_clock
from tests.support.host.processes import wait_patiently
from tests.support.platform import platform_schedule
from tests.support.platform.commands import Platform
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    folder = tmp_path / "clock"
    folder.mkdir()
    return make_clock(folder)


@proves(Promise.CLOCK_JUMP, "schedules go on within minutes; doctor finds no problem")
def test_schedules_of_a_platform_go_on_after_a_jump(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    with Platform(tmp_path / "home", ("--deploying", platform_schedule.__name__)) as platform:
        wait_patiently(lambda: runs(platform, "COMPLETED"), "a first run")
        for hours in (-3, 0):
            clock.jump_to(hours)
            known = runs(platform)
            wait_patiently(
                lambda: len(runs(platform, "COMPLETED") - known) >= 2,  # noqa: B023
                f"runs that were planned since the clock is at {hours:+} h",
            )
        platform.until_well()
        assert "PROBLEM" not in platform.run("doctor")[1]


def runs(platform: Platform, state: str = "%") -> set[str]:
    """Ids of the scheduled flow's runs in a state, by the database."""
    with closing(sqlite3.connect(platform.files.prefect / "prefect.db", timeout=60)) as database:
        found = database.execute(
            "SELECT run.id FROM flow_run AS run JOIN flow ON flow.id = run.flow_id "
            "WHERE flow.name = 'each-minute' AND run.state_type LIKE ?",
            [state],
        )
        return {run for (run,) in found}
