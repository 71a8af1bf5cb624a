"""Checkpoints beside training: a copy in host memory is taken at once and written meanwhile."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from tasks.kernel.errors import FalajError
from tasks.training.checkpoints.store import NUM_KEPT, CheckpointStore, to_host
from tasks.training.strategies.base import State

LOGGER = logging.getLogger(__name__)
# A tenth of a busy core's time: enough to come to an end, and no thread of training waits for it.
WRITER_NICENESS = 10


@dataclass(eq=False)
class CheckpointWriter:
    """Writes checkpoints of one run into a store, and prunes. A context; rank 0 only.

    At most one is being written. One within an epoch that comes meanwhile is left out; one that
    ends an epoch waits for it.

    Args:
        store: where they go.
        every_s: seconds between checkpoints within an epoch.
        asynchronous: write in the background, from a copy. Worth it where a GPU trains or the host
            has a core that no rank needs; without one, a writer beside ranks costs more than
            waiting for it.
        num_kept: complete checkpoints that are kept; older ones go.
    """

    store: CheckpointStore
    every_s: float
    asynchronous: bool = False
    num_kept: int = NUM_KEPT

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_give_way
        )
        self._last: Future[None] | None = None
        self._saved_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except FalajError as exc:
            if value is None:
                raise
            LOGGER.error("a checkpoint was not written either: %s", exc)

    @property
    def is_due(self) -> bool:
        """True where the last `save` is `every_s` ago: time for one within the epoch."""
        return time.monotonic() - self._saved_at >= self.every_s

    def save(
        self,
        epoch: int,
        step: int,
        state: Mapping[str, Any],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Take a copy of a state and see to its writing; training may change it at once.

        Args:
            epoch: where training resumes.
            step: likewise; 0 where an epoch has ended, and such a one is never left out.
            state: dicts, lists and tuples of plain values and tensors, on any device.
            then: called when the checkpoint is complete, in the thread that writes.

        Raises:
            StorageError: this write or an earlier one was refused.
            TransientError: the store did not answer.
            TrainingError: a state holds what a checkpoint cannot hold.
        """
        self._saved_at = time.monotonic()
        if step and self._last and not self._last.done():
            LOGGER.debug("epoch %d, step %d: the checkpoint before is still written", epoch, step)
            return
        self._wait()
        arguments = epoch, step, to_host(state, copy=self.asynchronous), then
        if self.asynchronous:
            self._last = self._executor.submit(self._write, *arguments)
        else:
            self._write(*arguments)

    def close(self) -> None:
        """Wait until all is written.

        Raises:
            StorageError, TransientError, TrainingError: as `save`.
        """
        self._executor.shutdown(wait=True)
        self._wait()

    def _wait(self) -> None:
        """Wait for the last write; raise its error once."""
        last, self._last = self._last, None
        if last:
            last.result()

    def _write(self, epoch: int, step: int, state: State, then: Callable[[], None] | None) -> None:
        self.store.prune(self.num_kept)  # what a killed writer left takes no space
        ref = self.store.save(epoch, step, state)
        LOGGER.debug("checkpoint %s was written", ref)
        if then:
            then()
        self.store.prune(self.num_kept)


def _give_way() -> None:
    """Let training have the cores first; on Linux a thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
