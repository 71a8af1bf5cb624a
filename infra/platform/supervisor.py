"""The supervisor: starts services in order, keeps them alive, and ends them in order.

It is one thread that sleeps until a child ends, a signal comes or a look is due. Should it be
killed, the guards of its children end everything; `up` then starts anew on the same state.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import psutil

from infra.platform.children import Child
from infra.platform.clock import Clock
from infra.platform.config import Place, PlatformConfig
from infra.platform.rotation import rotate
from infra.platform.state import CutRun, Phase, PlatformState, now, write_state
from tasks.kernel.errors import StorageError
from tasks.training.launch.guard import PR_SET_CHILD_SUBREAPER, descendants

LOGGER = logging.getLogger(__name__)

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
WATCHED_SIGNALS = STOP_SIGNALS | {signal.SIGCHLD}
LONGEST_SLEEP_S = 30.0
ROTATE_EVERY_S = 60.0
KILL_MARGIN_S = 10.0
"""A guard needs this long, beyond its grace, to end what will not end."""

STRAY_GRACE_S = 3.0
STRAY_POLL_S = 0.05


@dataclass
class Supervisor:
    """Keeps children alive until it is told to stop.

    Args:
        place: where state and logs go.
        config: grace and log limits.
        children: in the order of their start; they are ended in groups, see `stop_order`.
        stop_order: groups of names; each group has ended before the next is asked to.
        after_group: called with the number of a group once it has ended; returns runs cut off.
        on_up: called with the name of each child that has become ready.
        planner: name of the child that is started anew when the clock was set back.
        forget_plans: makes the planner forget what it had planned before that; asked again at the
            next look where it returns False.
        plans_are_wrong: the clock was set back before this start.
        clock: tells when it is set back.
        remarks: what `up` tells.
        rotate_every_s: seconds between two looks at the size of the logs.
    """

    place: Place
    config: PlatformConfig
    children: Sequence[Child]
    stop_order: Sequence[frozenset[str]]
    after_group: Callable[[int], Sequence[CutRun]]
    on_up: Callable[[str], None]
    planner: str | None = None
    forget_plans: Callable[[], bool] = lambda: True
    plans_are_wrong: bool = False
    clock: Clock = field(default_factory=Clock)
    remarks: tuple[str, ...] = ()
    rotate_every_s: float = ROTATE_EVERY_S
    started: datetime = field(default_factory=now)
    _cut_off: tuple[CutRun, ...] = ()
    _rotated: float = 0.0
    _published: object = None

    def run(self) -> None:
        """Run until a stop signal, then end everything."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it is queued, not discarded
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored ones are inherited by workers
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        phase: Phase = "starting"
        while True:
            self._end_strays()
            self._look_at_clock()
            for child in self._can_start():
                child.start()
            for child in self.children:
                was_up = child.condition == "up"
                child.look(probing=self._has_what_it_needs(child))
                if child.condition == "up" and not was_up:
                    self.on_up(child.service.name)
            if phase == "starting" and all(child.serves for child in self.children):
                phase = "up"
            self._publish(phase)
            self._rotate_logs()
            received = signal.sigtimedwait(WATCHED_SIGNALS, self._sleep_s())
            if received and received.si_signo in STOP_SIGNALS:
                LOGGER.info("stopping on signal %d", received.si_signo)
                self._stop()
                return

    def _look_at_clock(self) -> None:
        planner = next((c for c in self.children if c.service.name == self.planner), None)
        if back_s := self.clock.set_back_s():
            LOGGER.warning("the machine's clock was set back by %.0f s", back_s)
            self.plans_are_wrong = True
            for child in self.children:
                child.clock_was_set_back(back_s)
            if planner:
                planner.renew("plans by a clock that was set back")
        elif self.plans_are_wrong and planner and planner.condition == "up":
            self.plans_are_wrong = not self.forget_plans()

    def _can_start(self) -> list[Child]:
        """Children that wait, though all they need is there."""
        return [
            child
            for child in self.children
            if child.condition == "waiting" and self._has_what_it_needs(child)
        ]

    def _has_what_it_needs(self, child: Child) -> bool:
        serving = {other.service.name for other in self.children if other.serves}
        return serving.issuperset(child.service.needs)

    def _sleep_s(self) -> float:
        if self._can_start():
            return 0.0
        due = min((child.next_look for child in self.children), default=float("inf"))
        return min(LONGEST_SLEEP_S, self.rotate_every_s, max(0.05, due - time.monotonic()))

    def _stop(self) -> None:
        self._publish("stopping")
        for number, group in enumerate(self.stop_order):
            members = [child for child in self.children if child.service.name in group]
            for child in members:
                child.stop()
            self._wait_for(members)
            self._end_strays()
            self._cut_off += tuple(self.after_group(number))
            self._publish("stopping")
        self._publish("stopped")

    def _wait_for(self, members: Sequence[Child]) -> None:
        deadline = time.monotonic() + self.config.stop_grace_s + KILL_MARGIN_S
        while any([not child.gone for child in members]):
            if time.monotonic() > deadline:
                for child in members:
                    child.kill()
            signal.sigtimedwait({signal.SIGCHLD}, 0.2)

    def _end_strays(self) -> None:
        """End processes whose guard was killed: they have come to this process.

        A guard that is alive keeps its own descendants.
        """
        known = {child.process.pid for child in self.children if child.process}
        deadline = time.monotonic() + STRAY_GRACE_S
        asked: set[int] = set()
        while strays := [pid for pid in _own_children() if pid not in known]:
            insist = time.monotonic() > deadline
            for pid in [one for stray in strays for one in (stray, *descendants(stray))]:
                if pid not in asked or insist:
                    _send(pid, signal.SIGKILL if insist else signal.SIGTERM)
            if new := set(strays) - asked:
                LOGGER.warning("ending %s, whose guard has died", sorted(new))
            asked.update(strays)
            for pid in strays:
                _reap(pid)
            time.sleep(STRAY_POLL_S)

    def _publish(self, phase: Phase) -> None:
        services = tuple(child.state for child in self.children)
        if self._published == (shown := (phase, services, self._cut_off)):
            return
        self._published = shown
        state = PlatformState(
            pid=os.getpid(),
            phase=phase,
            started=self.started,
            written=now(),
            services=services,
            remarks=self.remarks,
            cut_off=self._cut_off,
        )
        try:
            write_state(self.place, state)
        except (StorageError, OSError) as exc:  # a full disk must not end what runs
            LOGGER.warning("the state cannot be written: %s", exc)
            self._published = None  # so that it is tried again

    def _rotate_logs(self) -> None:
        if time.monotonic() - self._rotated < self.rotate_every_s:
            return
        self._rotated = time.monotonic()
        for log in self.place.log("any").parent.glob("*.log"):
            try:
                rotate(log, self.config.log_limit_bytes, self.config.log_keep)
            except OSError as exc:
                LOGGER.warning("%s cannot be rotated: %s", log, exc)


def _own_children() -> list[int]:
    """Children of this process that have not been reaped."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as stream:
            return [int(pid) for pid in stream.read().split()]
    except FileNotFoundError:  # a kernel without this list
        return [child.pid for child in psutil.Process(me).children()]


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
