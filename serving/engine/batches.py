"""Calls that are computed together on a worker's thread, and what became of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False, slots=True)
class Batch:
    """One computation. A worker fills in the outcome; then the event loop reads it.

    Attributes:
        passed_over: hardware that failed or was full before.
        tried: hardware that failed to compute this very batch.
        error: why it failed; None where `output` holds the answers.
        backend_is_well: after a failure, whether the backend answers its probe.
        abandoned: it took too long, and its calls went elsewhere; what comes of it is dropped.
        singly: after a failure of a backend that is well, each call as a batch of its own.
    """

    slot: Slot
    version: LoadedVersion
    calls: list[Call]
    dones: list[Done]
    rows: int
    backend: Backend
    passed_over: str = ""
    tried: tuple[str, ...] = ()
    error: Exception | None = None
    backend_is_well: bool = False
    abandoned: bool = False
    singly: Sequence[Batch] = ()
    timer: asyncio.TimerHandle | None = None
    started: float = 0.0
    finished: float = 0.0
    inputs: dict[str, Array] = field(init=False)
    output: Array = field(init=False)

    @property
    def size(self) -> int:
        """Numbers in the first input, as `Times` counts them."""
        return self.rows * (self.version.row_size or self.version.size_of(self.calls[0]))

    def compute(self) -> None:
        """Run the backend; never raises."""
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
        self.singly = singly = []
        self.backend_is_well = self.backend.is_well()
        for call, done in zip(self.calls, self.dones, strict=True):
            if not self.backend_is_well:
                return
            alone = Batch(
                self.slot, self.version, [call], [done], call.num_rows, self.backend,
                self.passed_over,
            )  # fmt: skip
            alone.compute()
            if alone.error is not None:
                self.backend_is_well = self.backend.is_well()
            singly.append(alone)

    def again(self) -> Batch:
        """The same calls, to be computed elsewhere while a thread still holds this one."""
        return Batch(
            self.slot, self.version, self.calls, self.dones, self.rows, self.backend,
            self.passed_over, self.tried,
        )  # fmt: skip

    def drop_ended(self, now: float) -> Dropped:
        """Take out the calls that nobody waits for any more."""
        pairs = list(zip(self.calls, self.dones, strict=True))
        dropped = [(call, done, ended(call)) for call, done in pairs if call.is_over(now)]
        if dropped:
            kept = [(call, done) for call, done in pairs if not call.is_over(now)]
            self.calls = [call for call, _ in kept]
            self.dones = [done for _, done in kept]
            self.rows = sum(call.num_rows for call in self.calls)
        return dropped
