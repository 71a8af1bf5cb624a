"""Ten thousand verdicts on one model never start a second decision (`FALAJ_VERDICTS`: the number).

A database that is busy with such a storm may refuse the one run (503), and Prefect does not ask
again: that is told by an event, and the governor's sweep answers the verdict. A decision that is
neither started nor told of would be lost.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from infra.deploying.automations import COOLDOWN_S
from tests.deploys import (
    decisions,
    emit,
    num_events,
    part_of_the_file,
    plan_of,
    redeploy,
    wait_until_known,
)
from tests.prefect_platform import prefect_api_server
from tests.processes import wait_until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(3600)]

FAILED = "prefect.automation.action.failed"
VERDICTS = int(os.environ.get("FALAJ_VERDICTS", "10000"))


def test_a_storm_of_verdicts_starts_one_decision_a_cooldown_or_says_why_not(
    tmp_path: Path,
) -> None:
    with prefect_api_server(tmp_path / "prefect") as api, api.in_process():
        plan = plan_of(part_of_the_file("decision"), tmp_path)
        redeploy(plan)
        begun = time.monotonic()
        emit("falaj.model.storm", VERDICTS)
        wait_until(
            lambda: decisions() or num_events(FAILED),
            "no decision was started, and nobody said so",
            limit_s=600,
        )
        first_s = time.monotonic() - begun
        redeploy(plan)
        wait_until_known(VERDICTS, limit_s=1800)
        lasted_s = time.monotonic() - begun
        started = decisions()
        sys.stdout.write(
            f"{VERDICTS} verdicts in {lasted_s:.0f} s: {len(started)} decision(s), the first seen "
            f"after {first_s:.1f} s\n"
        )
        assert len(started) <= 1 + lasted_s // COOLDOWN_S
        assert started or num_events(FAILED)
