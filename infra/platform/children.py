"""One supervised child process: started under a guard, watched, started again when it dies."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from infra.platform.state import Condition, ServiceState, now
from tasks.kernel.errors import FalajError
from tasks.kernel.scratch import TEMPORARY, TMPDIR, new_folder
from tasks.kernel.settings import PROJECT_ROOT, make_folder
from tasks.training.launch import guard

LOGGER = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
STEADY_S = 60.0
"""A child that has been up for so long begins with the first delay again when it dies."""

STARTING_PROBE_S = 0.3
UP_PROBE_S = 20.0
WATCHED_PROBE_S = 10.0
"""Between two probes of what is started anew when it is silent."""

SILENT_PROBE_S = 2.0
START_LIMIT_S = 900.0
"""Migrations of a large database take minutes."""

SILENT_PROBES = 3
"""A server that lives and does not answer so often in a row is started anew. A probe waits 5 s, so
that this is within 30 s of its last answer."""


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
        restart_when_silent: start it anew where it lives and does not answer.
        before_start: called before each start; an error puts the start off.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    probe: Callable[[datetime], bool] | None = None
    needs: tuple[str, ...] = ()
    once: bool = False
    restart_when_silent: bool = False
    before_start: Callable[[], object] = lambda: None


@dataclass
class Child:
    """A service and the process that is it at present.

    Args:
        service: what it is.
        log: where its output goes.
        grace_s: from SIGTERM to SIGKILL for what it started.
    """

    service: Service
    log: Path
    grace_s: float
    condition: Condition = "waiting"
    detail: str = ""
    restarts: int = 0
    since: datetime = field(default_factory=now)
    process: subprocess.Popen[bytes] | None = None
    _delay_s: float = 0.0
    _next_look: float = 0.0
    _started: float = 0.0
    _started_at: datetime = field(default_factory=now)
    _silent: int = 0
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

    @property
    def next_look(self) -> float:
        """Moment (monotonic seconds) at which `look` has something to do, unless it ends before."""
        return self._next_look if self.condition != "waiting" else float("inf")

    def look(self, *, probing: bool = True) -> None:
        """Do what is due: notice the end, probe, start again.

        Args:
            probing: False where what it needs does not answer: its own probe would only wait.
        """
        if self.process and (code := self.process.poll()) is not None:
            self._has_ended(code)
        moment = time.monotonic()
        if moment < self._next_look:
            return
        if self.condition == "restarting":
            self.start()
        elif self.process and self.service.probe:
            if probing:
                self._probe(moment)
            else:
                self._next_look = moment + SILENT_PROBE_S

    def start(self) -> None:
        """Start it, now or, where that cannot be, later."""
        try:
            self.service.before_start()
        except FalajError as exc:
            self._put_off(f"cannot start yet: {exc}")
            return
        self._remove_temporary()
        line = [sys.executable, "-S", guard.__file__, str(os.getpid()), str(self.grace_s), "--"]
        make_folder(self.log.parent)
        try:
            self._temporary = new_folder(TEMPORARY)
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(
                    [*line, *self.service.command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**self.service.environment, TMPDIR: str(self._temporary)},
                    cwd=PROJECT_ROOT,
                )
        except OSError as exc:  # no process, no descriptor or no disk left
            self._put_off(f"cannot start yet: {exc}")
            return
        self._started, self._started_at = time.monotonic(), now()
        self._next_look = self._started + (STARTING_PROBE_S if self.service.probe else 0)
        self._silent = 0
        self._become("starting" if self.service.probe or self.service.once else "up", "")

    def stop(self) -> None:
        """Ask it, and all it started, to end; `gone` says when they have."""
        if self.process and self.process.poll() is None:
            self.process.terminate()

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
            self._next_look = float("inf")
            return
        if time.monotonic() - self._started > STEADY_S:
            self._delay_s = 0.0
        self.restarts += 1
        self._put_off(f"ended with code {code}")

    def _put_off(self, reason: str) -> None:
        self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s or FIRST_DELAY_S)
        self._next_look = time.monotonic() + self._delay_s
        LOGGER.warning("%s %s; next start in %g s", self.service.name, reason, self._delay_s)
        self._become("restarting", reason)

    def _probe(self, moment: float) -> None:
        assert self.service.probe
        well = self.service.probe(self._started_at)
        if self.condition == "starting":
            self._next_look = time.monotonic() + STARTING_PROBE_S
            if well:
                self._become("up", f"ready after {moment - self._started:.0f} s")
            elif moment - self._started > START_LIMIT_S:
                self.renew(f"was not ready after {START_LIMIT_S:.0f} s")
        elif well:
            self._silent = 0
            if self.condition == "silent":
                self._become("up", "answers again")
        else:
            self._silent += 1
            if self.condition == "up":
                self._become("silent", "lives, but does not answer")
            if self._silent >= SILENT_PROBES and self.service.restart_when_silent:
                self.renew(f"did not answer {self._silent} times in a row")
                return
        if self.condition in ("up", "silent"):
            self._next_look = time.monotonic() + self._pause_s

    @property
    def _pause_s(self) -> float:
        if not self.service.restart_when_silent:
            return UP_PROBE_S
        return SILENT_PROBE_S if self.condition == "silent" else WATCHED_PROBE_S

    def clock_was_set_back(self, seconds: float) -> None:
        """Bring noted moments to the clock as it is now: a worker heard of since is heard of."""
        self._started_at -= timedelta(seconds=seconds)
        self.since -= timedelta(seconds=seconds)

    def renew(self, reason: str) -> None:
        """Start it anew, though it lives."""
        LOGGER.warning("%s %s and is started anew", self.service.name, reason)
        self.stop()  # its guard ends it by force after the grace; `look` then sees the end
        self._next_look = time.monotonic() + UP_PROBE_S
        self._silent = 0

    def _become(self, condition: Condition, detail: str) -> None:
        if condition != self.condition:
            self.since = now()
        self.condition, self.detail = condition, detail
        LOGGER.info("%s: %s %s", self.service.name, condition, detail)
