"""The supervisor: starts services in order, keeps them alive, and ends them in order.

It is one thread that sleeps until a child ends, a signal comes or a probe is due. Should it be
killed, the guards of its children end everything; `up` then starts again on the same state.
"""

import ctypes
import logging
import os
import select
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import psutil

from infra.platform.config import SERVING
from infra.platform.files import (
    AS_CONFIGURED,
    Condition,
    CutRun,
    GroupState,
    Phase,
    PlatformFiles,
    PlatformState,
    ServiceState,
    now,
    write_state,
)
from infra.platform.scaling import Load, ScalingRule, decide
from tasks.kernel import guard
from tasks.kernel.errors import FalajError, StorageError
from tasks.kernel.files import TEMPORARY, TMPDIR, make_folder, new_folder
from tasks.kernel.settings import PROJECT_ROOT

LOGGER = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
STEADY_S = 60.0
"""A child that has been up for so long begins with the first delay again when it dies."""

STARTING_PROBE_S = 0.3
UP_PROBE_S = 10.0
SILENT_PROBE_S = 2.0
START_LIMIT_S = 900.0
"""Migrations of a large database take minutes."""

SILENT_PROBES = 3
"""A server that lives and does not answer so often in a row is restarted. A probe takes at most
5 s, so that this is within 30 s of its last answer."""

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
WATCHED_SIGNALS = STOP_SIGNALS | {signal.SIGCHLD, signal.SIGUSR1}
LONGEST_SLEEP_S = 30.0
GRACE_S = 15.0
"""From SIGTERM to SIGKILL for each process."""

KILL_MARGIN_S = 10.0
"""A guard needs this long, beyond its grace, to end what will not end."""

ORPHAN_GRACE_S = 3.0
ORPHAN_POLL_S = 0.05
ROTATE_EVERY_S = 60.0
LOG_LIMIT_BYTES = 10_000_000
LOGS_KEPT = 3
TAIL_BYTES = 64_000
EVALUATE_S = 10.0
FOUND_S, FOUND_LIMIT_S = 1.0, 30.0
"""A member that is up is found by the gateway no sooner, and waited for no longer."""
MOVING_S = 0.2
"""Between looks while members start, end or are replaced."""
CLOCK_STEP_S = 60.0
"""Less is what NTP mends on the way, and costs schedules no more than that."""


@dataclass(frozen=True)
class Service:
    """What a child is.

    Attributes:
        name: unique; also that of its log.
        command: program and arguments; no secrets, since everybody can read them.
        environment: all of it.
        probe: True where it does what it is for; gets the moment of its start.
        needs: services that must be up, or done, before it starts.
        once: it ends by itself, and is not started again.
        restart_when_silent: restart it where it lives and does not answer; not so a worker, which
            has runs in its hands.
        before_start: called before each start; an error puts the start off.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    probe: Callable[[datetime], bool] | None = None
    needs: tuple[str, ...] = ()
    once: bool = False
    restart_when_silent: bool = True
    before_start: Callable[[], object] = lambda: None


@dataclass
class Child:
    """A service and the process that runs it at present, under a guard.

    Args:
        service: what it is.
        log: where its output goes.

    Attributes:
        next_check: moment (monotonic seconds) at which `check` has something to do, unless the
            process ends before.
        is_retired: it is to end, and not to be started again.
    """

    service: Service
    log: Path
    condition: Condition = "waiting"
    detail: str = ""
    restarts: int = 0
    since: datetime = field(default_factory=now)
    process: subprocess.Popen[bytes] | None = None
    next_check: float = float("inf")
    is_retired: bool = False
    _delay_s: float = 0.0
    _started: float = 0.0
    _started_at: datetime = field(default_factory=now)
    _num_silent: int = 0
    _temporary: Path | None = None

    @property
    def state(self) -> ServiceState:
        """What to publish."""
        return ServiceState(
            name=self.service.name,
            condition=self.condition,
            pid=self.process.pid if self.process else None,
            restarts=self.restarts,
            since=self.since,
            detail=self.detail,
        )

    @property
    def serves(self) -> bool:
        """True where those that need it can start."""
        return self.condition in ("up", "done", "failed")

    def check(self, *, probing: bool = True) -> None:
        """Do what is due: notice the end, probe, start again.

        Args:
            probing: False where what it needs does not answer: its own probe would only time out.
        """
        if self.is_retired:
            return
        if self.process and (code := self.process.poll()) is not None:
            self._has_ended(code)
        if time.monotonic() < self.next_check:
            return
        if self.condition == "restarting":
            self.start()
        elif self.process and self.service.probe:
            if probing:
                self._probe(self.service.probe)
            else:
                self.next_check = time.monotonic() + SILENT_PROBE_S

    def start(self) -> None:
        """Start it, now or, where that cannot be, later."""
        self._remove_temporary()
        try:
            self.service.before_start()
            make_folder(self.log.parent)
            self._temporary = new_folder(TEMPORARY)
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(
                    guard.guarded(self.service.command, GRACE_S),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**self.service.environment, TMPDIR: str(self._temporary)},
                    cwd=PROJECT_ROOT,
                )
        except (FalajError, OSError) as exc:  # OSError: no process, descriptor or disk left
            self._put_off(f"cannot start yet: {exc}")
            return
        self._started, self._started_at = time.monotonic(), now()
        self.next_check = self._started + STARTING_PROBE_S if self.service.probe else float("inf")
        self._num_silent = 0
        self._become("starting" if self.service.probe or self.service.once else "up", "")

    def stop(self) -> None:
        """Ask it, and all it started, to end; `gone` is True when they have."""
        if self.process and self.process.poll() is None:
            self.process.terminate()

    def retire(self) -> None:
        """Ask it to end for good."""
        self.is_retired = True
        self.stop()

    def kill(self) -> None:
        """End the guard at once; what it guarded dies with it, or comes to the supervisor."""
        if self.process and self.process.poll() is None:
            self.process.kill()

    @property
    def gone(self) -> bool:
        """True where nothing of it runs."""
        if self.process is None or self.process.poll() is None:
            return self.process is None
        self.process = None
        self._remove_temporary()
        self._become("ended", "")
        return True

    def _remove_temporary(self) -> None:
        """Remove what the service, and all that it had started, left of temporary files."""
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary = None

    def _has_ended(self, code: int) -> None:
        self.process = None
        self._remove_temporary()
        if self.service.once:
            self._become("failed" if code else "done", f"exit code {code}" if code else "")
            self.next_check = float("inf")
            return
        if time.monotonic() - self._started > STEADY_S:
            self._delay_s = 0.0
        self.restarts += 1
        self._put_off(f"ended with code {code}")

    def _put_off(self, reason: str) -> None:
        self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s or FIRST_DELAY_S)
        self.next_check = time.monotonic() + self._delay_s
        LOGGER.warning("%s %s; next start in %g s", self.service.name, reason, self._delay_s)
        self._become("restarting", reason)

    def _probe(self, probe: Callable[[datetime], bool]) -> None:
        taken_s = time.monotonic() - self._started
        well = probe(self._started_at)
        self._num_silent = 0 if well or self.condition == "starting" else self._num_silent + 1
        if well and self.condition != "up":
            answer = f"ready after {taken_s:.0f} s" if self.condition == "starting" else ""
            self._become("up", answer or "answers again")
        elif self.condition == "up" and not well:
            self._become("silent", "lives, but does not answer")
        if self.condition == "starting" and taken_s > START_LIMIT_S:
            self.renew(f"was not ready after {START_LIMIT_S:.0f} s")
        elif self._num_silent >= SILENT_PROBES and self.service.restart_when_silent:
            self.renew(f"did not answer {self._num_silent} times in a row")
        else:
            pauses_s = {"starting": STARTING_PROBE_S, "silent": SILENT_PROBE_S}
            self.next_check = time.monotonic() + pauses_s.get(self.condition, UP_PROBE_S)

    def clock_was_set_back(self, seconds: float) -> None:
        """Shift noted moments to the corrected clock, so that heartbeats since count as later."""
        self._started_at -= timedelta(seconds=seconds)
        self.since -= timedelta(seconds=seconds)

    def renew(self, reason: str) -> None:
        """Restart it, though it lives."""
        LOGGER.warning("%s %s and is restarted", self.service.name, reason)
        self.stop()  # its guard ends it by force after the grace; `check` then sees the end
        self.next_check = time.monotonic() + UP_PROBE_S
        self._num_silent = 0

    def _become(self, condition: Condition, detail: str) -> None:
        if condition != self.condition:
            self.since = now()
        self.condition, self.detail = condition, detail
        LOGGER.info("%s: %s %s", self.service.name, condition, detail)


@dataclass
class Group:
    """Like children by their numbers, from 0; how many there are changes meanwhile.

    It starts what is missing, ends what is too many, and replaces its members one by one: the next
    one only when all are up and found again, so that somebody always answers.

    Args:
        rule: how many.
        make: a child of a number.
        measure: what the group does now, from its members; None where that is not known.
        are_found: whether the gateway sends requests to all members.
    """

    rule: ScalingRule
    make: Callable[[int], Child]
    measure: Callable[[Sequence[Child]], Load | None]
    are_found: Callable[[], bool] = lambda: True
    members: dict[int, Child] = field(default_factory=dict)
    reason: str = AS_CONFIGURED
    to_replace: list[int] = field(default_factory=list)
    _is_replacing: bool = False
    _ending: dict[int, Child] = field(default_factory=dict)
    _needed: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.wanted, self._evaluated = self.rule.least, time.monotonic()
        self._needed.append((self._evaluated, self.wanted))

    def adjust(self, name: str, children: list[Child]) -> float:
        """Do what is due, by changing the supervisor's children; seconds until the next look."""
        for number in [number for number, child in self._ending.items() if child.gone]:
            children.remove(self._ending.pop(number))
        is_fixed = self.rule.least == self.rule.affordable
        self._is_replacing = self._is_replacing or bool(self.to_replace)
        if not (is_fixed or self._is_replacing) and time.monotonic() > self._evaluated + EVALUATE_S:
            self._evaluate(name, time.monotonic())
        # Where there is one alone, another one answers until the new one is up and found.
        target = max(self.wanted, 2) if self._is_replacing and self.wanted else self.wanted
        for number in set(range(target)) - self.members.keys() - self._ending.keys():
            self.members[number] = self.make(number)
            children.append(self.members[number])
        for number in self.members.keys() - set(range(target)):
            self._end(number)
        if self._is_replacing and not self._ending and self._are_settled():
            if self.to_replace:
                self._end(self.to_replace.pop(0))
            else:
                self._is_replacing = False
        is_moving = self._ending or self._is_replacing or len(self.members) != self.wanted
        return MOVING_S if is_moving else float("inf") if is_fixed else EVALUATE_S

    def _are_settled(self) -> bool:
        if not all(child.condition == "up" for child in self.members.values()):
            return False
        up_s = (now() - max(child.since for child in self.members.values())).total_seconds()
        return up_s > FOUND_LIMIT_S or (up_s > FOUND_S and self.are_found())

    def _end(self, number: int) -> None:
        self._ending[number] = self.members.pop(number)
        self._ending[number].retire()

    def _evaluate(self, name: str, moment: float) -> None:
        self._evaluated = moment
        if (load := self.measure([*self.members.values()])) is None:
            return
        while self._needed and self._needed[0][0] <= moment - self.rule.cool_down_s:
            self._needed.popleft()
        decision = decide(self.rule, load, [count for _, count in self._needed])
        self._needed.append((moment, decision.needed))
        if decision.count != self.wanted:
            LOGGER.info("%s: %d, were %d: %s", name, decision.count, self.wanted, decision.reason)
        self.wanted, self.reason = decision.count, decision.reason


@dataclass
class Clock:
    """Notices when the machine's clock was set back, against the clock that counts from its boot.

    Prefect's server plans by the machine's clock: when each of its services works next, and the
    runs of schedules some hours ahead. Where the clock is set back, all of this lies ahead, and the
    server plans nothing until the old time has come again. So it is restarted, and the runs that it
    had planned are removed; the scheduler makes them again by the corrected clock.

    Args:
        shown: seconds, by the clock that can be set.
        steady: seconds, by one that cannot.
    """

    shown: Callable[[], float] = time.time
    steady: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)

    def __post_init__(self) -> None:
        self._ahead_s = self.shown() - self.steady()

    def set_back_s(self) -> float:
        """Seconds by which it was set back since the last call; 0 where it was not."""
        ahead_s = self.shown() - self.steady()
        back_s, self._ahead_s = self._ahead_s - ahead_s, ahead_s
        return back_s if back_s >= CLOCK_STEP_S else 0.0


class Signals:
    """Stop signals and the ends of children, as they come.

    They come by a pipe: a signal that this thread blocks would go to a thread that some library
    has started, and end the process there.
    """

    def __init__(self) -> None:
        self._pipe, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in WATCHED_SIGNALS:
            signal.signal(number, lambda *_: None)

    def wait(self, limit_s: float) -> set[int]:
        """The signals that have come; none where none came within `limit_s` seconds."""
        ready, _, _ = select.select([self._pipe], [], [], limit_s)
        return set(os.read(self._pipe, 4096)) if ready else set()


@dataclass
class Supervisor:
    """Keeps children alive until a stop signal.

    Args:
        files: where state and logs go.
        children: in the order of their start.
        servers: names of those that end last: the others need them to end in order.
        after_workers: called between the two groups; returns runs that were cut off.
        on_up: called with the name of each child that has become ready.
        planner: name of the child that is restarted when the clock was set back.
        forget_plans: removes what the planner had planned before that; called again at the next
            turn where it returns False.
        plans_are_wrong: the clock was set back before this start.
        groups: children that may be there several times, by name; those of `serving` are replaced
            one by one on SIGUSR1.
    """

    files: PlatformFiles
    children: list[Child]
    servers: frozenset[str]
    after_workers: Callable[[], Sequence[CutRun]]
    on_up: Callable[[str], None]
    planner: str | None = None
    forget_plans: Callable[[], bool] = lambda: True
    plans_are_wrong: bool = False
    groups: Mapping[str, Group] = field(default_factory=dict)
    _adjust_s: float = 0.0
    _clock: Clock = field(default_factory=Clock)
    _started: datetime = field(default_factory=now)
    _cut_off: tuple[CutRun, ...] = ()
    _rotated: float = 0.0
    _published: object = None

    def run(self) -> None:
        """Run until a stop signal, then end everything."""
        signals = Signals()
        ctypes.CDLL(None).prctl(guard.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        phase: Phase = "starting"
        while True:
            self._end_orphans()
            self._check_clock()
            pauses = [group.adjust(name, self.children) for name, group in self.groups.items()]
            self._adjust_s = min(pauses, default=float("inf"))
            for child in self._can_start():
                child.start()
            for child in self.children:
                was_up = child.condition == "up"
                child.check(probing=self._has_what_it_needs(child))
                if child.condition == "up" and not was_up:
                    self.on_up(child.service.name)
            if all(child.serves for child in self.children):
                phase = "up"
            self._publish(phase)
            self._rotate_logs()
            seen = signals.wait(self._sleep_s())
            if signal.SIGUSR1 in seen and (group := self.groups.get(SERVING)):
                group.to_replace = [*group.members]
            if asked := STOP_SIGNALS.intersection(seen):
                LOGGER.info("stopping on signal %d", min(asked))
                self._stop(signals)
                return

    def _check_clock(self) -> None:
        planner = next((c for c in self.children if c.service.name == self.planner), None)
        if back_s := self._clock.set_back_s():
            LOGGER.warning("the machine's clock was set back by %.0f s", back_s)
            self.plans_are_wrong = True
            for child in self.children:
                child.clock_was_set_back(back_s)
            if planner:
                planner.renew("plans by a clock that was set back")
        elif self.plans_are_wrong and planner and planner.condition == "up":
            self.plans_are_wrong = not self.forget_plans()

    def _can_start(self) -> list[Child]:
        """Children that have not been started, though all they need is there."""
        waiting = [c for c in self.children if c.condition == "waiting" and not c.is_retired]
        return [child for child in waiting if self._has_what_it_needs(child)]

    def _has_what_it_needs(self, child: Child) -> bool:
        serving = {other.service.name for other in self.children if other.serves}
        return serving.issuperset(child.service.needs)

    def _sleep_s(self) -> float:
        if self._can_start():
            return 0.0
        due = min((child.next_check for child in self.children), default=float("inf"))
        longest = min(LONGEST_SLEEP_S, ROTATE_EVERY_S, self._adjust_s)
        return min(longest, max(0.05, due - time.monotonic()))

    def _stop(self, signals: Signals) -> None:
        self._publish("stopping")
        self._end([c for c in self.children if c.service.name not in self.servers], signals)
        self._cut_off = tuple(self.after_workers())
        self._publish("stopping")
        self._end([c for c in self.children if c.service.name in self.servers], signals)
        self._publish("stopped")

    def _end(self, members: Sequence[Child], signals: Signals) -> None:
        for child in members:
            child.stop()
        deadline = time.monotonic() + GRACE_S + KILL_MARGIN_S
        while any([not child.gone for child in members]):
            if time.monotonic() > deadline:
                for child in members:
                    child.kill()
            signals.wait(0.2)
        self._end_orphans()

    def _end_orphans(self) -> None:
        """End processes whose guard was killed: they have come to this process.

        A guard that is alive keeps its own descendants.
        """
        known = {child.process.pid for child in self.children if child.process}
        deadline = time.monotonic() + ORPHAN_GRACE_S
        asked: set[int] = set()
        while orphans := [c.pid for c in psutil.Process().children() if c.pid not in known]:
            insist = time.monotonic() > deadline
            for pid in [one for orphan in orphans for one in (orphan, *guard.descendants(orphan))]:
                if pid not in asked or insist:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if insist else signal.SIGTERM)
            if new := set(orphans) - asked:
                LOGGER.warning("ending %s, whose guard has died", sorted(new))
            asked.update(orphans)
            for pid in orphans:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(ORPHAN_POLL_S)

    def _publish(self, phase: Phase) -> None:
        services = tuple(child.state for child in self.children)
        groups = tuple(
            GroupState(name=name, count=len(g.members), wanted=g.wanted, reason=g.reason)
            for name, g in self.groups.items()
        )
        if self._published == (shown := (phase, services, groups, self._cut_off)):
            return
        self._published = shown
        state = PlatformState(
            pid=os.getpid(),
            phase=phase,
            started=self._started,
            written=now(),
            services=services,
            groups=groups,
            cut_off=self._cut_off,
        )
        try:
            write_state(self.files, state)
        except (StorageError, OSError) as exc:  # a full disk must not end what runs
            LOGGER.warning("the state cannot be written: %s", exc)
            self._published = None  # so that it is tried again

    def _rotate_logs(self) -> None:
        if time.monotonic() - self._rotated < ROTATE_EVERY_S:
            return
        self._rotated = time.monotonic()
        for log in self.files.logs.glob("*.log"):
            try:
                rotate(log)
            except OSError as exc:
                LOGGER.warning("%s cannot be rotated: %s", log, exc)


def rotate(log: Path) -> None:
    """Move a log that is too large aside, while a process keeps writing it.

    The process holds the file open for appending, so the content is copied and the file emptied.
    What is written between the last check and the emptying, some microseconds, is lost. Of the
    rotated files `<name>.1` is the newest.
    """
    if not log.exists() or log.stat().st_size < LOG_LIMIT_BYTES:
        return
    numbered = [log.with_name(f"{log.name}.{number}") for number in range(1, LOGS_KEPT + 1)]
    for newer, older in reversed([*pairwise(numbered)]):
        if newer.exists():
            newer.replace(older)
    with log.open("r+b") as source, numbered[0].open("wb") as target:
        while source.tell() < os.fstat(source.fileno()).st_size:
            shutil.copyfileobj(source, target)
        source.truncate(0)


def tail(log: Path, lines: int, since: int = 0) -> list[str]:
    """The last lines of a log, from `since` bytes on; none where there is no log yet."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(since, log.stat().st_size - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
