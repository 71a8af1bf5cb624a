"""The controller when events are lost, and when it is deployed again amid a cool-down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.control.config import RetrainingPolicy
from tests.support.control import builders
from tests.support.control.platforms import (
    ControlledPlatform,
    acting,
    controlled_platform,
    outcomes,
)
from tests.support.host.processes import wait_patiently
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

CAUTIOUS = RetrainingPolicy(cool_down_hours=6)


@proves(Promise.REDEPLOY, "one run; the second incident waits out its cool-down, then one more")
def test_a_cool_down_outlives_deploys_and_restarts(tmp_path: Path) -> None:
    with controlled_platform(tmp_path) as platform:
        first = platform.judge(builders.stale(0), CAUTIOUS)
        platform.emit([first])
        wait_patiently(platform.retrainings, "the first retraining")
        platform.judge(builders.stable(1), CAUTIOUS)
        again = platform.judge(builders.stale(2), CAUTIOUS)
        platform.emit([again])
        wait_patiently(lambda: "cool_down" in outcomes(platform), "it has to wait")
        before = automations(platform)
        for _ in range(2):
            assert " 0 written, 0 differences" in platform.deploy_by_command()
        assert automations(platform) == before
        platform.emit([again, first] * 10)
        wait_for_sweeps(platform, 2)
    with controlled_platform(
        tmp_path
    ) as platform:  # server and worker anew, and deployed once more
        platform.emit([again, first] * 10)
        wait_for_sweeps(platform, 2)
        assert len(platform.retrainings()) == len(acting(platform)) == 1
        assert outcomes(platform) == ["acts", "nothing_to_do", "cool_down"]

        let_hours_pass(platform, 7)
        wait_patiently(lambda: len(platform.retrainings()) == 2, "its turn comes")
        wait_for_sweeps(platform, 2)
        assert sorted(key for key, _ in platform.retrainings()) == sorted(acting(platform))
        assert len(acting(platform)) == 2


def automations(platform: ControlledPlatform) -> list[object]:
    """All automations as they are stored: with their ids, and when they were last changed."""
    return platform.prefect("SELECT * FROM automation ORDER BY id")


def wait_for_sweeps(platform: ControlledPlatform, number: int) -> None:
    """Until the schedule has started so many more sweeps, and they were completed."""
    before = platform.num_sweeps()
    wait_patiently(lambda: platform.num_sweeps() >= before + number, "sweeps by schedule")


def let_hours_pass(platform: ControlledPlatform, hours: int) -> None:
    """Make all claims so much older, as if time had gone by."""
    platform.operation(f"UPDATE falaj_claims SET uptime_s = uptime_s - {hours * 3600}")
