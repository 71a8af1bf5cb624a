"""A machine's clock that is set back, as the platform sees it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.platform.supervisor import Clock
from tests.support.host.clocks import make_clock
from tests.support.host.processes import wait_until
from tests.support.platform.supervised import sleeper, supervised


def test_a_clock_that_is_set_back_is_told_of_once() -> None:
    shown, steady = [1000.0], [10.0]
    clock = Clock(lambda: shown[0], lambda: steady[0])
    assert clock.set_back_s() == 0
    shown[0], steady[0] = 1500.0, 510.0  # time goes by
    assert clock.set_back_s() == 0
    shown[0] -= 3600
    assert clock.set_back_s() == pytest.approx(3600)
    assert clock.set_back_s() == 0
    shown[0] += 3600  # set ahead: what was planned is late, and is done at once
    assert clock.set_back_s() == 0
    shown[0] -= 30  # what NTP mends
    assert clock.set_back_s() == 0


def test_the_server_is_started_anew_when_the_clock_is_set_back_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = make_clock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    children = [{"name": name, "command": sleeper(tmp_path)} for name in ("server", "worker-x")]
    with supervised(tmp_path, *children) as platform:
        platform.until_up()
        first = platform.child("server").pid
        clock.jump_to(+5)
        clock.jump_to(-5)
        platform.until(
            lambda state: state.services[0].restarts == 1 and state.services[0].condition == "up",
            "the server is started anew",
        )
        assert platform.child("server").pid != first
        assert platform.child("worker-x").restarts == 0
        assert platform.child("worker-x").since < datetime.now(UTC) - timedelta(hours=4)
        assert "clock was set back by" in platform.said()
        told = tmp_path / "forgotten"  # the first time it could not
        wait_until(lambda: told.exists() and told.read_text() == "asked\n" * 2, "asked twice", 60)
    assert told.read_text() == "asked\n" * 2
