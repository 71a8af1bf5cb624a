"""Calls that are computed together on a worker's thread, and what became of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from serving.calls import Array, Call, Slot
from serving.engine.backends import Backend
from serving.engine.queues import Dropped, ended, joined
from serving.engine.versions import LoadedVersion
from serving.interfaces import Done

Job = Callable[[], None]


class Workers:
    """A few threads that take jobs in order; cheaper for each job than an executor with futures.

    Args:
        count: of threads.
        name: of each, for those who look at the process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._name = name
        self._threads: list[threading.Thread] = []
        for _ in range(count):
            self.grow()

    def submit(self, job: Job) -> None:
        """Run a job on one of the threads; it must not raise."""
        self._jobs.put(job)

    def grow(self) -> None:
        """One more thread, such as for one that a job does not give back."""
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def shrink(self) -> None:
        """One thread less, when it is done with what it has."""
        self._jobs.put(None)

    def stop(self, wait_s: float) -> None:
        """Let the jobs end that were submitted, for at most so long."""
        deadline = time.monotonic() + wait_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # holds a batch


Single = tuple[dict[str, Array], Array, float, float]
"""Inputs, output, begin and end of one call's own computation."""


class Batch:
    """One computation. A worker fills in the outcome; then the event loop reads it.

    Attributes:
        passed_over: hardware that failed or was full before.
        tried: hardware that failed to compute this very batch.
        error: why it failed; None where `output` holds the answers.
        backend_is_well: after a failure, whether the backend answers its probe.
        abandoned: it took too long, and its calls went elsewhere; what comes of it is dropped.
        singly: after a failure of a backend that is well, what each call gave on its own.
    """

    __slots__ = (
        "abandoned",
        "backend",
        "backend_is_well",
        "calls",
        "dones",
        "error",
        "finished",
        "inputs",
        "output",
        "passed_over",
        "rows",
        "singly",
        "size",
        "slot",
        "started",
        "timer",
        "tried",
        "version",
    )

    def __init__(
        self,
        slot: Slot,
        version: LoadedVersion,
        calls: list[Call],
        dones: list[Done],
        rows: int,
        size: int,
        passed_over: str,
    ) -> None:
        self.slot: Slot = slot
        self.version = version
        self.calls = calls
        self.dones = dones
        self.rows = rows
        self.size = size
        self.passed_over = passed_over
        self.tried: set[str] = set()
        self.abandoned = False
        self.timer: asyncio.TimerHandle | None = None
        self.backend: Backend | None = None
        self.inputs: dict[str, Array] = {}
        self.output: Array
        self.error: Exception | None = None
        self.backend_is_well = False
        self.singly: list[Single | Exception] = []
        self.started = self.finished = 0.0

    def compute(self) -> None:
        """Run the backend; never raises."""
        assert self.backend is not None
        self.started = time.monotonic()
        try:
            self.inputs = joined(self.calls, self.version.names)
            self.output = self.backend.run(self.inputs, self.rows)
        except Exception as exc:  # of any runtime: the caller looks into it
            self.error = exc
        self.finished = time.monotonic()

    def examine(self) -> None:
        """After a failure: is it the backend, or what one of the calls brought? Never raises.

        Each call is computed on its own. It is to blame where it fails again although the backend
        answers its probe before and after; else the backend is.
        """
        assert self.backend is not None
        self.singly = []
        self.backend_is_well = self.backend.is_well()
        for call in self.calls:
            if not self.backend_is_well:
                return
            outcome = self._single(call)
            if isinstance(outcome, Exception):
                self.backend_is_well = self.backend.is_well()
            self.singly.append(outcome)

    def again(self) -> Batch:
        """The same calls, to be computed elsewhere while a thread still holds this one."""
        other = Batch(
            self.slot, self.version, self.calls, self.dones, self.rows, self.size, self.passed_over
        )
        other.tried = set(self.tried)
        return other

    def drop_ended(self, now: float) -> Dropped:
        """Take out the calls that nobody waits for any more."""
        dropped: Dropped = []
        kept: list[tuple[Call, Done]] = []
        for call, done in zip(self.calls, self.dones, strict=True):
            if call.is_gone or (call.deadline is not None and call.deadline <= now):
                dropped.append((call, done, ended(call)))
            else:
                kept.append((call, done))
        if dropped:
            self.calls = [call for call, _ in kept]
            self.dones = [done for _, done in kept]
            self.rows = sum(call.num_rows for call in self.calls)
        return dropped

    def _single(self, call: Call) -> Single | Exception:
        assert self.backend is not None
        started = time.monotonic()
        try:
            inputs = joined([call], self.version.names)
            output = self.backend.run(inputs, call.num_rows)
        except Exception as exc:  # as above
            return exc
        return inputs, output, started, time.monotonic()
