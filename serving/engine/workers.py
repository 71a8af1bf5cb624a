"""Threads that compute batches which would hold up the event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

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
