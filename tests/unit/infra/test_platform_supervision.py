"""The supervisor, with real child processes, and under a clock that is set back."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.orchestration.client import is_running
from infra.platform import supervisor
from infra.platform.api import PROBE_TIMEOUT_S
from infra.platform.supervisor import Child, Clock, Service
from tests.support.host.clocks import make_clock
from tests.support.host.processes import command_of, pids_whose_command_holds, wait_until
from tests.support.platform import supervised as supervised_module
from tests.support.platform.supervised import LIMIT_S, sleeper, supervised

SCRIPT = [sys.executable, "-S", "-c"]


def test_a_child_that_ends_is_started_again_with_a_growing_delay(tmp_path: Path) -> None:
    ending = {"name": "worker-x", "command": [*SCRIPT, "raise SystemExit(3)"]}
    steady = {"name": "server", "command": sleeper(tmp_path)}
    with supervised(tmp_path, ending, steady) as platform:
        platform.until(lambda s: s.services[0].restarts >= 3, "three restarts")
        for seconds in (1, 2, 4):
            assert f"ended with code 3; next start in {seconds} s" in platform.said()
        assert platform.child("server").restarts == 0
        first = platform.child("server").pid
        os.kill(first, signal.SIGKILL)
        platform.until(
            lambda s: s.services[1].restarts == 1 and s.services[1].condition == "up", "again up"
        )
        assert platform.child("server").pid != first
    assert pids_whose_command_holds(str(tmp_path)) == []


LEAVING = """
import os, pathlib, time
pathlib.Path(os.environ["TMPDIR"], "left").touch()
time.sleep(600)
"""


def test_temporary_files_of_a_service_go_with_it_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    def left() -> list[Path]:
        return list(temporary.glob("*/left"))

    child = {"name": "worker-x", "command": [*SCRIPT, LEAVING]}
    with supervised(tmp_path, child) as platform:
        wait_until(left, "a temporary file")
        (first,) = left()
        pid = platform.child("worker-x").pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: left() and not first.exists(), "that of the next start alone")
        assert len(left()) == 1
        platform.process.kill()
        platform.process.wait()
        (of_killed,) = left()
    with supervised(tmp_path, child):
        wait_until(lambda: left() and not of_killed.exists(), "what a killed supervisor left")
    assert list(temporary.iterdir()) == []


@dataclass
class Hung:
    """A service that answered once and then lets each probe wait; its clock is its own."""

    now_s: float = 1000.0
    answered_s: float = 0.0
    hangs: bool = False
    num_probes: int = 0

    def monotonic(self) -> float:
        return self.now_s

    def probe(self, started: datetime) -> bool:
        self.num_probes += 1
        if self.hangs:
            self.now_s += PROBE_TIMEOUT_S
            return False
        self.answered_s = self.now_s
        return True


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hung, Child]]:
    service = Hung()
    monkeypatch.setattr(supervisor, "time", service)
    described = Service("server", tuple(sleeper(tmp_path)), {}, probe=service.probe)
    child = Child(described, tmp_path / "log")
    child.start()
    service.now_s = child.next_check
    child.check()
    assert child.condition == "up"
    service.hangs = True
    yield service, child
    child.process.kill()
    child.process.wait(LIMIT_S)


def test_a_server_that_does_not_answer_is_started_anew_within_30_s_of_its_last_answer(
    hung: tuple[Hung, Child], caplog: pytest.LogCaptureFixture
) -> None:
    service, child = hung
    while "is restarted" not in caplog.text:
        service.now_s = child.next_check
        child.check()
    assert service.now_s - service.answered_s <= 30
    assert child.condition == "silent"


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    forking = "import os, time\nfor _ in range(2):\n os.fork()\n"
    forking += "os.getpid() == os.getsid(0) or os.setsid()\ntime.sleep(600)"
    forking += f" # {tmp_path}"
    children = ({"name": n, "command": [*SCRIPT, forking]} for n in ("server", "worker-x"))
    with supervised(tmp_path, *children) as platform:
        platform.until_up()
        wait_until(lambda: len(pids_whose_command_holds(str(tmp_path))) >= 9, "all forked", LIMIT_S)
        platform.process.kill()
        platform.process.wait()
    wait_until(lambda: pids_whose_command_holds(str(tmp_path)) == [], "nothing left", LIMIT_S)
    assert not is_running(tmp_path)


def test_what_a_killed_guard_leaves_is_ended_before_the_next_start(tmp_path: Path) -> None:
    mark = f"{tmp_path}-orphan"
    forking = f"import os, time\nif os.fork() == 0:\n os.setsid()\ntime.sleep(600) # {mark}"
    with supervised(tmp_path, {"name": "worker-x", "command": [*SCRIPT, forking]}) as platform:
        platform.until_up()
        wait_until(lambda: len(living(mark)) == 2, "parent and child", LIMIT_S)
        before = living(mark)
        guard = platform.child("worker-x").pid
        os.kill(guard, signal.SIGKILL)
        platform.until(lambda s: s.services[0].restarts == 1, "restart")
        assert not set(living(mark)) & set(before)


def living(mark: str) -> list[int]:
    """Processes of the command itself: guard and supervisor hold it too, as an argument."""
    others = ("guard.py", supervised_module.__name__)
    commands = {pid: command_of(pid) for pid in pids_whose_command_holds(mark)}
    return [pid for pid, line in commands.items() if line and not any(o in line for o in others)]


def test_it_starts_in_order_and_ends_workers_before_what_they_need(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    told = f"""
import pathlib, signal, sys, time
def tell(*_):
    open({f"{tmp_path}/order"!r}, "a").write(sys.argv[1])
    raise SystemExit
signal.signal(signal.SIGTERM, tell)
pathlib.Path({str(tmp_path)!r}, sys.argv[1].strip() + " listens").touch()
time.sleep(600)
"""
    server = {"name": "server", "command": [*SCRIPT, told, "server\n"], "probe": str(ready)}
    once = {"name": "deploying", "command": [*SCRIPT, "raise SystemExit(4)"], "once": True}
    once["needs"] = ["server"]
    needs = ["server", "deploying"]
    worker = {"name": "worker-x", "command": [*SCRIPT, told, "worker\n"], "needs": needs}
    with supervised(tmp_path, worker, once, server) as platform:
        platform.until(lambda s: s.services[2].condition == "starting", "server starting")
        assert platform.child("worker-x").condition == "waiting"
        assert platform.child("deploying").condition == "waiting"
        ready.touch()
        platform.until_up()
        assert platform.child("deploying").condition == "failed"
        assert platform.child("deploying").detail == "exit code 4"
        wait_until(lambda: len([*tmp_path.glob("* listens")]) == 2, "handlers", LIMIT_S)
        platform.process.terminate()
        assert platform.process.wait(LIMIT_S) == 0
        state = platform.state()
    assert (tmp_path / "order").read_text() == "worker\nworkers ended\nserver\n"
    assert state.phase == "stopped"
    assert [run.name for run in state.cut_off] == ["some-run"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_stop_signal_ends_all_also_what_ignores_sigterm(
    tmp_path: Path, number: signal.Signals
) -> None:
    ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    child = {"name": "server", "command": [*SCRIPT, f"{ignoring} # {tmp_path}"]}
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script's `command &` does
    try:
        with supervised(tmp_path, child) as platform:
            platform.until_up()
            platform.process.send_signal(number)
            assert platform.process.wait(LIMIT_S) == 0
    finally:
        signal.signal(signal.SIGINT, previous)
    assert pids_whose_command_holds(str(tmp_path)) == []


def test_a_child_that_cannot_be_started_is_tried_again_and_its_log_is_rotated(
    tmp_path: Path,
) -> None:
    program = tmp_path / "later"
    with supervised(tmp_path, {"name": "server", "command": [str(program)]}) as platform:
        platform.until(lambda s: s.services[0].restarts >= 1, "a first attempt")
        program.write_text("#!/bin/sh\nhead -c 20000 /dev/zero\nexec sleep 600\n")
        program.chmod(0o755)
        platform.until_up()
        platform.until(lambda s: s.services[0].condition == "up", "up")
        rotated = platform.files.log("server").with_name("server.log.1")
        wait_until(rotated.exists, "rotation", 3 * LIMIT_S)
        assert rotated.stat().st_size >= 20_000


def test_a_clock_that_is_set_back_is_noticed_once() -> None:
    shown, steady = [1000.0], [10.0]
    clock = Clock(lambda: shown[0], lambda: steady[0])
    seen = []
    for step, passed in ((0, 0), (500, 500), (-3600, 0), (0, 0), (3600, 0), (-30, 0)):
        # Set ahead, what was planned is late and is done at once; half a minute NTP corrects.
        shown[0], steady[0] = shown[0] + step, steady[0] + passed
        seen.append(clock.set_back_s())
    assert seen == pytest.approx([0, 0, 3600, 0, 0, 0])


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
        told = tmp_path / "forgotten"  # the first time it could not
        wait_until(lambda: told.exists() and told.read_text() == "asked\n" * 2, "asked twice", 60)
