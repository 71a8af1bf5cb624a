"""Meter of the runs of one process: each moment counts to the innermost run that is open.

So what the runs of a process took adds up to what its tree of processes took, and a run that is
inside another is not counted twice.
"""

import atexit
import getpass
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import psutil
from sqlalchemy.exc import SQLAlchemyError

from tasks.contracts.hardware import HardwareClass, PriceList, class_of_run, read_classes
from tasks.contracts.telemetry import ResourceUse
from tasks.costs.ledger import CostLedger, Entry
from tasks.kernel.errors import FalajError
from tasks.kernel.process import tree_cpu_s

MOST_LETTERS = 120
"""Of an owner's name in the ledger."""
LOGGER = logging.getLogger(__name__)
RENEW_EVERY_S = 30.0
"""What a run that is killed took since is lost."""
START_CPU_S = 60.0
"""CPU seconds of a process before its first run that count to it: loaded libraries, its own server.
One that has done more was not started for its runs. What it does after the last one counts alike.
"""
Joules = Callable[[], float | None]


class Reading(NamedTuple):
    """Counters that only rise, and the moment by a clock that nobody sets."""

    at_s: float
    cpu_s: float
    """Of the tree of this process."""
    host_s: float
    """CPU seconds of the whole host."""
    joules: float | None
    """Of the host's processors."""


@dataclass
class Taken:
    """What a run has taken so far, and what of it no meter of energy has seen."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    metered_j: float = 0.0
    unmetered_cpu_s: float = 0.0
    unmetered_gpu_s: float = 0.0

    def add(self, before: "Reading", now: "Reading", num_gpus: int) -> None:
        """What was taken between two readings; of the host's energy the part of its CPU time."""
        cpu_s, host_s = now.cpu_s - before.cpu_s, now.host_s - before.host_s
        seconds = now.at_s - before.at_s
        self.seconds += seconds
        self.cpu_s += cpu_s
        self.gpu_s += seconds * num_gpus
        self.unmetered_gpu_s += seconds * num_gpus
        if now.joules is None or before.joules is None or host_s <= 0:
            self.unmetered_cpu_s += cpu_s
        else:
            self.metered_j += (now.joules - before.joules) * min(1.0, cpu_s / host_s)

    def priced(self, prices: PriceList) -> ResourceUse:
        """With the rest of its energy by stated watts, and the money of cores, GPUs and energy."""
        estimate_j = prices.watts_per_core * self.unmetered_cpu_s
        estimate_j += prices.watts_per_gpu * self.unmetered_gpu_s
        joules = self.metered_j + estimate_j
        return ResourceUse(
            seconds=self.seconds,
            cpu_s=self.cpu_s,
            gpu_s=self.gpu_s,
            joules=joules,
            estimated=estimate_j > 0,
            amount=prices.money(self.cpu_s, self.gpu_s, joules),
            currency=prices.currency,
        )


@dataclass
class _Run:
    """A run that is open in this process."""

    facts: dict[str, str]
    started: datetime
    taken: Taken
    number: int | None = None


class RunMeter:
    """What the runs of this process take, written to the ledger at each begin and end of one.

    While any run is open a thread renews the entries too. What goes wrong here is logged and fails
    no run.

    Args:
        ledger: opens the ledger of an outermost run.
        host_joules: of all processors of this host so far; a run has the part of them that it has
            of the host's CPU time. None where they cannot be read.
        cpu_s: CPU seconds of the tree of this process so far.
    """

    def __init__(
        self,
        ledger: Callable[[], CostLedger],
        host_joules: Joules,
        cpu_s: Callable[[], float] = tree_cpu_s,
    ) -> None:
        self._open_ledger, self._host_joules, self._cpu_s = ledger, host_joules, cpu_s
        self._seen: Reading | None = None
        self._num_gpus = 0
        self._runs: dict[str, _Run] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._is_own = False
        self._ledger: CostLedger | None = None
        self._classes: dict[str, HardwareClass] = {}
        self._ended: tuple[str, _Run] | None = None

    def begin(
        self, run_id: str, flow: str, root_id: str, use_case: str = "", model: str = ""
    ) -> None:
        """A run begins; one that is open already, such as a run that is retried, goes on.

        Args:
            run_id: of the run.
            flow: its name.
            root_id: of the outermost run, for one that is inside none here.
            use_case: none: that of the run around it.
            model: none: that of the run around it.
        """
        with self._lock:
            self._settle()
            facts = {"use_case": use_case, "model": model, "root_id": root_id}
            if self._runs:
                around = self._innermost().facts
                facts = {name: facts[name] or around[name] for name in facts}
                facts["root_id"] = around["root_id"]
            facts |= {"run_id": run_id, "flow": flow, "state": "running"}
            facts["owner"] = _owner()
            if not self._runs:
                self._ledger, self._classes, self._stop = None, {}, threading.Event()
                threading.Thread(target=self._renew, args=(self._stop,), daemon=True).start()
            self._runs.setdefault(run_id, _Run(facts, datetime.now(UTC), Taken()))
            self._write()

    def end(self, run_id: str, state: str) -> None:
        """A run has ended; of one that is not open here nothing is done."""
        with self._lock:
            if run_id in self._runs:
                self._settle()
                self._runs[run_id].facts["state"] = state
                self._write()
                self._ended = run_id, self._runs.pop(run_id)
            if not self._runs:
                self._stop.set()

    @contextmanager
    def holding(self, num_gpus: int, joules: Joules) -> Iterator[None]:
        """The innermost run holds so many GPUs all the while; `joules` is what they took so far."""
        before = joules() if num_gpus else None
        with self._lock:
            self._settle()
            self._num_gpus = num_gpus
        began = time.monotonic()
        try:
            yield
        finally:
            after = joules() if num_gpus else None
            with self._lock:
                self._settle()
                self._num_gpus = 0
                if before is not None and after is not None and self._runs:
                    taken = self._innermost().taken
                    taken.metered_j += max(0.0, after - before)
                    held_s = (time.monotonic() - began) * num_gpus
                    taken.unmetered_gpu_s = max(0.0, taken.unmetered_gpu_s - held_s)

    def _add_end(self) -> None:
        """At the exit of the process: its end counts to the last run."""
        if self._ended and self._seen and not self._runs and self._is_own:
            if self._cpu_s() - self._seen.cpu_s < START_CPU_S:
                self._runs = dict([self._ended])
                self._settle()
                self._write()

    def _innermost(self) -> _Run:
        return next(reversed(self._runs.values()))

    def _settle(self) -> None:
        """Give what was taken since the last time to the innermost run."""
        host = psutil.cpu_times()
        host_s = sum(host[:8]) - host.idle - host.iowait
        now = Reading(time.monotonic(), self._cpu_s(), host_s, self._host_joules())
        before, self._seen = self._seen, now
        if before is None:
            self._is_own = now.cpu_s < START_CPU_S
            self._seen = now._replace(cpu_s=0.0 if self._is_own else now.cpu_s)
            atexit.register(self._add_end)
        elif self._runs:
            # A child that ended a moment ago may be in no sum yet: it is in the next one.
            self._seen = now._replace(cpu_s=max(before.cpu_s, now.cpu_s))
            self._innermost().taken.add(before, self._seen, self._num_gpus)

    def _write(self) -> None:
        """Renew the entries of all open runs."""
        runs = [*self._runs.values()]
        try:
            self._classes = self._classes or read_classes()
            self._ledger = self._ledger or self._open_ledger()
            entries = [(_entry(run, self._classes), run.number) for run in runs]
            for run, number in zip(runs, self._ledger.write(entries), strict=True):
                run.number = number
        except (FalajError, SQLAlchemyError, OSError, KeyError) as exc:
            LOGGER.warning("what runs took is not written, they go on: %s", exc)

    def _renew(self, stop: threading.Event) -> None:
        while not stop.wait(RENEW_EVERY_S):
            with self._lock:
                self._settle()
                self._write()


def _owner() -> str:
    """Whom the use belongs to: `FALAJ_OWNER`, else the process's account."""
    try:
        return (os.environ.get("FALAJ_OWNER") or getpass.getuser())[:MOST_LETTERS]
    except (KeyError, OSError):  # an account that has no name, as in a container
        return str(os.getuid())


def _entry(run: _Run, classes: Mapping[str, HardwareClass]) -> Entry:
    name, prices = class_of_run(classes, on_gpu=run.taken.gpu_s > 0)
    values = {"started": run.started, "ended": datetime.now(UTC), "use": run.taken.priced(prices)}
    return Entry.model_validate({**run.facts, **values, "hardware_class": name})
