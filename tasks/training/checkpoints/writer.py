"""Checkpoints beside training: a copy in host memory is taken at once and written meanwhile."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from tasks.kernel.errors import FalajError
from tasks.training.checkpoints.state import Keys, TakenApart, take_apart
from tasks.training.checkpoints.store import NUM_KEPT, CheckpointStore

LOGGER = logging.getLogger(__name__)
# A tenth of a busy core's time: enough to come to an end, and no thread of training waits for it.
WRITER_NICENESS = 10


@dataclass(frozen=True)
class WriterFigures:
    """What a writer has done so far."""

    num_written: int = 0
    num_left_out: int = 0
    """Within an epoch: replaced by a newer one before they were written, or not begun."""
    copy_s: float = 0.0
    """Seconds for which training stood still."""
    write_s: float = 0.0
    """Seconds of writing, in the background where it is asynchronous."""


class HostCopies:
    """Copies of states' tensors in host memory; used again, so that pages are touched once."""

    def __init__(self) -> None:
        self._free: list[dict[Keys, Tensor]] = []
        self._lock = threading.Lock()

    def copy(self, state: TakenApart) -> TakenApart:
        """The same state in tensors that nobody else changes; `release` gives them back."""
        with self._lock:
            buffers = self._free.pop() if self._free else {}

        def copied(keys: Keys, tensor: Tensor) -> Tensor:
            buffer = buffers.get(keys)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

        copy = state.with_tensors(copied)
        if any(tensor.is_cuda for tensor in state.values().values()):
            torch.cuda.synchronize()
        return copy

    def release(self, copy: TakenApart) -> None:
        """Let the next copy use this one's memory."""
        with self._lock:
            self._free.append(copy.values())


@dataclass(frozen=True, eq=False)
class _Queued:
    future: Future[None]
    copy: TakenApart
    ends_epoch: bool


class CheckpointWriter:
    """Writes checkpoints of one run into a store, and prunes. A context; rank 0 only.

    At most one is being written and one waits. A newer one takes the place of one that waits, but
    never of one that ends an epoch.

    Args:
        store: where they go.
        every_s: seconds between checkpoints within an epoch.
        asynchronous: write in the background, from a copy, which takes the memory of two more
            states. Worth it where a GPU trains or the host has a core that no rank needs; without
            one, a writer beside ranks costs more than waiting for it.
        num_kept: whole checkpoints that are kept; older ones go.
    """

    def __init__(
        self,
        store: CheckpointStore,
        every_s: float,
        *,
        asynchronous: bool = False,
        num_kept: int = NUM_KEPT,
    ) -> None:
        self._store = store
        self._every_s = every_s
        self._asynchronous = asynchronous
        self._num_kept = num_kept
        self._copies = HostCopies()
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_give_way
        )
        self._queue: list[_Queued] = []
        self._saved_at = time.monotonic()
        self._lock = threading.Lock()
        self.figures = WriterFigures()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except FalajError as exc:
            if value is None:
                raise
            LOGGER.error("a checkpoint was not written either: %s", exc)

    @property
    def is_due(self) -> bool:
        """True where the last `save` is `every_s` ago: time for one within the epoch."""
        return time.monotonic() - self._saved_at >= self._every_s

    def note_saved(self) -> None:
        """Count from now until the next is due: all ranks have written one together."""
        self._saved_at = time.monotonic()

    @property
    def failed(self) -> bool:
        """True where a write has failed of which nobody has been told yet."""
        done = [queued.future for queued in self._queue if queued.future.done()]
        return any(future.exception() for future in done)

    def save(
        self,
        epoch: int,
        step: int,
        state: Mapping[str, Any],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Take a copy of a state and see to its writing; training may change it at once.

        Args:
            epoch: where training goes on from.
            step: likewise; 0 where an epoch has ended, and such a one is never dropped.
            state: dicts, lists and tuples of plain values and tensors, on any device.
            then: called when the checkpoint is whole, in the thread that writes; such as to say
                that an epoch is done, which is true only now.

        Raises:
            StorageError: this write or an earlier one was refused.
            TransientError: the store did not answer.
            TrainingError: a state holds what a checkpoint cannot hold.
        """
        self._saved_at = time.monotonic()
        taken = take_apart(state)
        if not self._asynchronous:
            self._write(epoch, step, taken, then)
            return
        self._raise_failures()
        if not self._make_room(ends_epoch=step == 0):
            self._count(num_left_out=1)
            return
        started = time.monotonic()
        copy = self._copies.copy(taken)
        self._count(copy_s=time.monotonic() - started)
        future = self._executor.submit(self._write_copy, epoch, step, copy, then)
        self._queue.append(_Queued(future, copy, ends_epoch=step == 0))

    def close(self) -> None:
        """Wait until all is written.

        Raises:
            StorageError, TransientError, TrainingError: as `save`.
        """
        self._executor.shutdown(wait=True)
        self._raise_failures()

    def _raise_failures(self) -> None:
        """Forget what is done; raise the error of the first that failed."""
        done = [queued for queued in self._queue if queued.future.done()]
        self._queue = [queued for queued in self._queue if queued not in done]
        for queued in done:
            queued.future.result()

    def _make_room(self, *, ends_epoch: bool) -> bool:
        """Make the waiting place free; False where one that ends an epoch has it, and may stay."""
        waiting = [queued for queued in self._queue if not _has_begun(queued.future)]
        if not waiting:
            return True
        if waiting[0].ends_epoch:
            if ends_epoch:
                self._queue.pop(0).future.result()
            return ends_epoch
        if waiting[0].future.cancel():
            self._queue.remove(waiting[0])
            self._copies.release(waiting[0].copy)
            self._count(num_left_out=1)
        return True

    def _write_copy(
        self, epoch: int, step: int, copy: TakenApart, then: Callable[[], None] | None
    ) -> None:
        try:
            self._write(epoch, step, copy, then)
        finally:
            self._copies.release(copy)

    def _write(
        self, epoch: int, step: int, state: TakenApart, then: Callable[[], None] | None
    ) -> None:
        self._store.prune(self._num_kept)  # what a killed writer left takes no space
        started = time.monotonic()
        ref = self._store.save_taken_apart(epoch, step, state)
        seconds = time.monotonic() - started
        self._count(num_written=1, write_s=seconds)
        LOGGER.debug("checkpoint %s was written in %.3f s", ref, seconds)
        if then:
            then()
        self._store.prune(self._num_kept)

    def _count(self, **more: float) -> None:
        with self._lock:
            sums = {name: getattr(self.figures, name) + value for name, value in more.items()}
            self.figures = replace(self.figures, **sums)


def _give_way() -> None:
    """Let training have the cores first; on Linux a thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)


def _has_begun(future: Future[None]) -> bool:
    return future.running() or future.done()
