"""The controller in a storm of events, and when it is deployed again amid a cool-down.

`FALAJ_DRIFT_EVENTS` (default 10,000) says how many events there are. The server keeps its events in
SQLite: one that is busy with such a storm may refuse a run (503), and Prefect does not ask again.
So what counts is the end: the controller's sweep must have answered what no event could start.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import pytest

from tasks.control.config import RetrainingPolicy
from tests.support.control import builders, platforms
from tests.support.host.processes import wait_patiently
from tests.support.platform.deploys import redeploy
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

CAUTIOUS = RetrainingPolicy(cool_down_hours=6)


@proves(Promise.REDEPLOY, "one run; the second incident waits out its cool-down, then one more")
def test_a_cool_down_outlives_deploys_and_restarts(tmp_path: Path) -> None:
    with platforms.controlled_platform(tmp_path) as platform:
        first = platform.judge(builders.stale(0), CAUTIOUS)
        platform.emit([first])
        wait_patiently(platform.retrainings, "the first retraining")
        platform.judge(builders.stable(1), CAUTIOUS)
        again = platform.judge(builders.stale(2), CAUTIOUS)
        platform.emit([again])
        wait_patiently(lambda: "cool_down" in platforms.outcomes(platform), "it has to wait")
        before = automations(platform)
        for _ in range(2):
            assert " 0 written, 0 differences" in platform.deploy_by_command()
        assert automations(platform) == before
        platform.emit([again, first] * 10)
        wait_for_sweeps(platform, 2)
    with platforms.controlled_platform(
        tmp_path
    ) as platform:  # server and worker anew, and deployed once more
        platform.emit([again, first] * 10)
        wait_for_sweeps(platform, 2)
        assert len(platform.retrainings()) == len(platforms.acting(platform)) == 1
        assert platforms.outcomes(platform) == ["acts", "nothing_to_do", "cool_down"]

        let_hours_pass(platform, 7)
        wait_patiently(lambda: len(platform.retrainings()) == 2, "its turn comes")
        wait_for_sweeps(platform, 2)
        assert sorted(key for key, _ in platform.retrainings()) == sorted(
            platforms.acting(platform)
        )
        assert len(platforms.acting(platform)) == 2


def automations(platform: platforms.ControlledPlatform) -> list[object]:
    """All automations as they are stored: with their ids, and when they were last changed."""
    return platform.prefect("SELECT * FROM automation ORDER BY id")


def wait_for_sweeps(platform: platforms.ControlledPlatform, number: int) -> None:
    """Until the schedule has started so many more sweeps, and they were completed."""
    before = platform.num_sweeps()
    wait_patiently(lambda: platform.num_sweeps() >= before + number, "sweeps by schedule")


def let_hours_pass(platform: platforms.ControlledPlatform, hours: int) -> None:
    """Make all claims so much older, as if time had gone by."""
    platform.operation(f"UPDATE falaj_claims SET uptime_s = uptime_s - {hours * 3600}")


QUIET_S = 60
NUM_EVENTS = int(os.environ.get("FALAJ_DRIFT_EVENTS", "10000"))


# A busy server cuts connections, and Prefect's client leaves those that it replaces.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@proves(Promise.DRIFT_BURST, "10,000 events: one run; those of two incidents: two, by plain SQL")
@proves(Promise.ONE_RETRAINING, "10,000 events: one run; those of two incidents: two, by plain SQL")
def test_a_storm_of_one_result_starts_one_retraining_and_two_incidents_start_two(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    record_property("trials", NUM_EVENTS)
    with platforms.controlled_platform(tmp_path) as platform:
        begun = time.monotonic()
        first = platform.judge(builders.stale(0))
        platform.emit([first] * (NUM_EVENTS // 2))
        wait_patiently(platform.retrainings, "the first retraining")
        started_s = time.monotonic() - begun
        redeploy(platform.plan)  # in the middle of the storm
        platform.emit([first] * (NUM_EVENTS // 4))
        assert len(platform.retrainings()) == 1

        platform.judge(builders.stable(1))
        second = platform.judge(builders.stale(2))
        platform.emit(list(islice(cycle([first, second]), NUM_EVENTS // 4)))
        num_known = wait_until_quiet(platform)
        known_s = time.monotonic() - begun
        wait_patiently(
            lambda: len(platform.retrainings()) == 2 and not platforms.num_unanswered(platform),
            "the second retraining, and every result answered",
        )
        sweeps = platform.num_sweeps()
        wait_patiently(lambda: platform.num_sweeps() > sweeps + 1, "two more sweeps")

        incidents = platforms.acting(platform)
        assert sorted(key for key, _ in platform.retrainings()) == sorted(incidents)
        assert len(set(incidents)) == 2
        assert platforms.outcomes(platform) == ["acts", "nothing_to_do", "acts"]
        sys.stdout.write(
            f"{NUM_EVENTS:,} events, {num_known:,} of them kept, quiet after {known_s:.0f} s: "
            f"{len(incidents)} retrainings, the first {started_s:.1f} s after its result\n"
        )


def wait_until_quiet(platform: platforms.ControlledPlatform) -> int:
    """Until the server has taken in what it will; a busy one loses some. Returns how many."""
    known = -1
    while (now_known := platform.num_events()) != known:
        known = now_known
        time.sleep(QUIET_S)
    return known
