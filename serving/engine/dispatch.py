"""Takes calls out of their queues, computes them together, and hands over the answers.

A call is queued and one flush is scheduled for the next turn of the event loop; a flush takes what
is queued by then, so what arrives together is computed together and nothing waits for company. A
batch that is expected to be short runs right there, a longer one on a worker's thread while the
queue grows. A turn takes a few milliseconds of batches: then the loop reads what else came, and
refuses what would wait too long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from serving.engine.backends import Backend
from serving.engine.config import EngineConfig
from serving.engine.outcomes import Outcomes, sentence_of
from serving.engine.queues import Batch, Dropped, Limits, RequestQueue, Workers, contiguous, place
from serving.engine.versions import LoadedVersion
from serving.errors import (
    BackendError,
    NotReadyError,
    OverloadedError,
    ServingError,
    TooLargeError,
)
from serving.interfaces import Answer, Call, Done, Observer

logger = logging.getLogger(__name__)
SWEEP_S = 0.05
TURN_S, MOST_TURN_S = 0.004, 0.025
"""Batches are computed for so long before the loop reads what else came: for as long as it had read
before, within these bounds. A flood of refusals must not leave the answers a part of each turn."""
DEEP = 4
"""Batches that may wait whatever the goal says: a model may take longer than its goal."""
LEAST_RETRY_S = 0.05


class Dispatcher:
    """Queues, micro-batches and backends of all models; on the event loop's thread alone.

    Args:
        config: hardware, and rows of a batch.
        limits: of what waits and of how long a batch may take.
        loop: that everything happens on.
        observers: notified of every batch and refusal, in this order.
        idle: called with a version when its last use has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
        observers: Sequence[Observer],
        idle: Callable[[LoadedVersion], None],
    ) -> None:
        self.requests = 0
        self.rows = 0
        self.outcomes = Outcomes(loop, observers)
        self.idle = idle
        self._limits = limits
        self._loop = loop
        self._ready: deque[RequestQueue] = deque()
        self._shadows: deque[RequestQueue] = deque()
        self._waiting: list[RequestQueue] = []
        self._retries: deque[Batch] = deque()
        self._scheduled = self._sweeping = self._ended = False
        self._flushed_at = 0.0
        self._running: Counter[str] = Counter()
        self._most_running = {one.name: one.workers for one in config.hardware}
        self._workers: dict[str, Workers] = {}
        self._batch_rows = config.batch_rows
        self._total_requests, self._total_rows = limits.total_requests, limits.total_rows

    # Queueing

    def queue(self, queue: RequestQueue, call: Call, done: Done) -> None:
        """Put a call into a queue, or refuse it in the next turn of the loop."""
        rows = call.num_rows
        if (
            len(queue.entries) >= queue.most_requests
            or queue.rows + rows > queue.most_rows
            or self.requests >= self._total_requests
            or self.rows + rows > self._total_rows
        ) and not self._makes_room(queue, rows):
            self.outcomes.refuse(call, done, self._overloaded(queue, rows))
            return
        objection = self.too_long(queue) or queue.version.objection(call)
        if objection is not None:
            self.outcomes.refuse(call, done, objection)
            return
        queue.entries.append((call, done))
        queue.rows += rows
        self.rows += rows
        self.requests += 1
        if not queue.listed:
            queue.listed = True
            queue.version.uses += 1
            (self._shadows if queue.is_shadow else self._ready).append(queue)
            if not self._scheduled:
                self._schedule()
        elif len(queue.entries) == queue.helped_from + 1 and len(queue.version.backends) > 1:
            self._wake()

    def too_long(self, queue: RequestQueue) -> OverloadedError | None:
        """Why one more call would wait too long; None where it may wait.

        What fits into the next batch may in any case, so that nothing is refused at low load.
        """
        if queue.rows < self._batch_rows and not queue.version.has_free_axes:
            return None
        batches, each_ms = self._ahead(queue)
        # Of calls with more rows than a batch each is taken alone, and the pace is theirs.
        paced_ms = min(batches, len(queue.entries)) * queue.pace_ms(time.monotonic())
        wait_ms = max(batches * each_ms, paced_ms)
        working = sum(one.circuit.closed for one in queue.version.backends)
        # Others than the first begin to help at the goal; without them half is left for the rest.
        goal_ms = queue.goal_ms * (working if working > 1 else 0.5)
        if not batches or wait_ms <= max(goal_ms, DEEP * each_ms):
            return None
        version = queue.version
        return OverloadedError(
            f"one more request would wait {wait_ms:.0f} ms for {version.model} ({queue.track}), "
            f"whose goal is {queue.goal_ms:g} ms; nothing was computed, come again",
            retry_after_s=max(LEAST_RETRY_S, wait_ms / 1e3),
        )

    def _ahead(self, queue: RequestQueue) -> tuple[int, float]:
        """Batches before one more call, and what the model takes for each, in ms."""
        version, times = queue.version, queue.version.backends[0].times
        if not version.has_free_axes:
            return queue.rows // self._batch_rows, times.expected_ms(
                self._batch_rows * version.row_size
            )
        num = len(queue.entries)
        if not num:
            return 0, 0.0
        first = queue.entries[0][0]
        together = max(1.0, queue.together)
        rows = min(queue.rows / num * min(together, num), self._batch_rows)
        return int(num / together), times.expected_ms(round(rows * version.size_of(first)))

    def retarget(self, queue: RequestQueue, version: LoadedVersion) -> None:
        """Let another version answer what waits in a queue and what comes."""
        former = queue.version
        queue.version = version
        if queue.listed and former is not version:
            version.uses += 1
            self._release(former)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not (self.requests or self._retries or self._running.total())

    def abandon(self, error: Callable[[Call], ServingError]) -> None:
        """Refuse everything that waits, and start nothing any more."""
        self._ended = True
        for queue in (*self._ready, *self._shadows, *self._waiting):
            self._empty(queue, error)

    def stop(self, wait_s: float) -> None:
        """End the workers' threads."""
        for workers in self._workers.values():
            workers.stop(wait_s)

    def _makes_room(self, queue: RequestQueue, rows: int) -> bool:
        """Drop mirrored calls, newest first, where only the process's bounds are in the way."""
        if (
            queue.is_shadow
            or len(queue.entries) >= queue.most_requests
            or queue.rows + rows > queue.most_rows
        ):
            return False
        while self.requests >= self._total_requests or self.rows + rows > self._total_rows:
            victims = [one for one in (*self._shadows, *self._waiting) if one.is_shadow]
            victim = max(victims, key=lambda one: len(one.entries), default=None)
            if victim is None or not victim.entries:
                return False
            call, done = victim.entries.pop()
            victim.rows -= call.num_rows
            self.requests -= 1
            self.rows -= call.num_rows
            text = "a mirrored request made room for one that somebody waits for"
            self.outcomes.refuse(call, done, OverloadedError(text))
        return True

    def _overloaded(self, queue: RequestQueue, rows: int) -> ServingError:
        most = min(queue.most_rows, self._total_rows)
        if rows > most:
            return TooLargeError(
                f"{rows} rows were sent, at most {most} may wait; send them in parts"
            )
        version = queue.version
        batches = 1 + queue.rows // self._batch_rows
        full = min(queue.rows, self._batch_rows) * version.row_size
        seconds = batches * version.backends[0].times.expected_ms(full) / 1e3
        return OverloadedError(
            f"{len(queue.entries)} requests with {queue.rows} rows wait for {version.model} "
            f"({queue.track}), {self.requests} in all; nothing was computed, come again",
            retry_after_s=max(LEAST_RETRY_S, seconds),
        )

    # Computing

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Start or compute batches for a few ms, and come again while there are others."""
        self._scheduled = False
        now = time.monotonic()
        end = now + min(max(TURN_S, now - self._flushed_at), MOST_TURN_S)
        if self._retries:
            self._retry()
        queues = self._ready or self._shadows
        while queues:
            queue = queues.popleft()
            if queue.entries and not self._serve(queue):
                self._waiting.append(queue)
                self._watch()
                continue
            if queue.entries:
                queues.append(queue)
            else:
                queue.listed = False
                self._release(queue.version)
            if queues and time.monotonic() >= end:
                break
        self._flushed_at = time.monotonic()
        if self._ready or self._shadows:
            self._schedule()

    def _serve(self, queue: RequestQueue) -> bool:
        """Take a batch from a queue and see to it; False where its hardware is at work."""
        version = queue.version
        is_lone = len(version.backends) == 1 and len(queue.entries) == 1
        if is_lone and self._serve_one(queue, version):
            return True
        now = time.monotonic()
        found = self._place(queue, now)
        if found is None:
            if any(one.circuit.closed for one in version.backends):
                return False
            self._give_up(queue, now)
            return True
        backend, passed_over = found
        queued = queue.rows
        calls, dones, rows, dropped = queue.take(self._batch_rows, now)
        queue.note_taken(len(calls), now)
        self.requests -= len(calls) + len(dropped)
        self.rows -= queued - queue.rows
        self.outcomes.report_refusals(dropped)
        if not calls:
            return True
        batch = Batch(queue.track, version, calls, dones, rows, backend, passed_over)
        expected_ms = backend.times.expected_ms(batch.size)
        if expected_ms < self._limits.inline_ms or self._is_starved(queue, expected_ms, now):
            self._compute_here(batch)
        else:
            self._send(batch)
        return True

    def _is_starved(self, queue: RequestQueue, expected_ms: float, now: float) -> bool:
        """Whether a thread would rest for most of each turn, for the loop is slow to come back.

        Then a batch that takes no longer than a turn may is better computed right here.
        """
        return expected_ms < TURN_S * 1e3 and queue.pace_ms(now) > 2 * expected_ms

    def _serve_one(self, queue: RequestQueue, version: LoadedVersion) -> bool:
        """A lone call that is soon computed, the usual one at low load; False where it is not that.

        The same as the longer way by `take`, with as little as can be around the model.
        """
        backend = version.backends[0]
        call, done = queue.entries[0]
        rows = call.num_rows
        size = rows * (version.row_size or version.size_of(call))
        started = time.monotonic()
        if (
            backend.busy
            or not backend.circuit.closed
            or call.is_over(started)
            or backend.times.expected_ms(size) >= self._limits.inline_ms
        ):
            return False
        queue.entries.popleft()
        queue.rows -= rows
        if queue.waiting_since:
            queue.note_taken(1, started)
        self.requests -= 1
        self.rows -= rows
        try:
            inputs = contiguous(call, version.names)
            output = backend.run(inputs, rows)
        except Exception as exc:  # of any runtime: looked into on a thread
            self._send(Batch(queue.track, version, [call], [done], rows, backend, error=exc))
            return True
        finished = time.monotonic()
        backend.times.note(size, (finished - started) * 1e3)
        tally = backend.tallies.get((queue.track, "")) or version.tally(backend, queue.track, "")
        try:
            done(call, Answer({version.output: output}, tally.served))
        except Exception:  # of a protocol
            self.outcomes.lost(call)
        self.outcomes.count([call], inputs, version, output, tally, started, finished)
        return True

    def _place(self, queue: RequestQueue, now: float) -> tuple[Backend, str] | None:
        """The backend for the next batch, and which hardware was passed over for it."""
        version, rows = queue.version, min(queue.rows, self._batch_rows)
        size = rows * (version.row_size or version.size_of(queue.entries[0][0]))
        if len(version.backends) > 1:
            first = version.backends[0]
            wait_ms = queue.rows / max(rows, 1) * first.times.expected_ms(size)
            if first.busy:
                wait_ms += max(0.0, first.running_ms - (now - first.running_since) * 1e3)
            queue.note_load(wait_ms)

        def is_free(backend: Backend) -> bool:
            return not backend.busy and (
                not self._is_full(backend.hardware)
                or backend.times.expected_ms(size) < self._limits.inline_ms
            )

        return place(version.backends, queue.is_spilling, is_free)

    def _compute_here(self, batch: Batch) -> None:
        batch.compute()
        if batch.error is not None:
            self._send(batch)
            return
        self._note_time(batch)
        self.outcomes.deliver(batch)

    def _send(self, batch: Batch) -> None:
        """Have a batch computed on a thread, or looked into there where it failed."""
        backend = batch.backend
        backend.running_since = time.monotonic()
        backend.running_ms = backend.times.expected_ms(batch.size)
        batch.timer = self._loop.call_later(self._limits.batch_s, self._overdue, batch)
        self._occupy(batch.version, backend)

        def work() -> None:
            if batch.error is None:
                batch.compute()
            if batch.error is not None:
                batch.examine()
            self._loop.call_soon_threadsafe(self._finished, batch)

        self._workers_of(backend.hardware).submit(work)

    def _finished(self, batch: Batch) -> None:
        backend, version = batch.backend, batch.version
        assert batch.timer is not None
        batch.timer.cancel()
        backend.busy = False
        if batch.abandoned:
            self._workers_of(backend.hardware).shrink()
            self._probe_later(version, backend)
            self._release(version)
            return
        self._running[backend.hardware] -= 1
        if batch.error is None:
            self._note_time(batch)
            self.outcomes.deliver(batch)
        elif batch.backend_is_well:
            self.outcomes.deliver_singly(batch)
        else:
            self._fall_over(batch)
        self._wake()
        self._release(version)

    def _note_time(self, batch: Batch) -> None:
        batch.backend.times.note(batch.size, (batch.finished - batch.started) * 1e3)

    # Failing

    def _fall_over(self, batch: Batch) -> None:
        """A backend does not answer its own probe: keep away from it, and ask the next one."""
        backend, version, now = batch.backend, batch.version, time.monotonic()
        assert batch.error is not None
        backend.failures += 1
        if backend.circuit.closed:
            backend.circuit.failed(sentence_of(batch.error), now)
            if not backend.busy:
                self._probe_later(version, backend)
        logger.warning(
            "%s version %s: %s on %s failed (%s) and is tried again in %.1f s",
            version.model, version.version, backend.variant, backend.hardware,
            backend.circuit.reason, backend.circuit.retry_at - now,
        )  # fmt: skip
        batch.passed_over = backend.hardware
        batch.tried = (*batch.tried, backend.hardware)
        if _untried(batch):
            version.uses += 1
            self._retries.append(batch)
            self._schedule()
        else:
            self._fail(batch, f": {backend.circuit.reason}")

    def _fail(self, batch: Batch, reason: str) -> None:
        text = (
            f"{batch.version.model} version {batch.version.version} could not be computed on "
            f"{', '.join(sorted(batch.tried))}{reason}"
        )
        for call, done in zip(batch.calls, batch.dones, strict=True):
            self.outcomes.report_refusal(call, done, BackendError(text))

    def _overdue(self, batch: Batch) -> None:
        """A thread does not come back with a batch: leave it to that, and compute it elsewhere.

        The backend is asked again when the thread did come back.
        """
        hardware = batch.backend.hardware
        batch.abandoned = True
        self._running[hardware] -= 1
        self._workers_of(hardware).grow()
        other = batch.again()
        other.error = TimeoutError(f"no answer within {self._limits.batch_s:g} s")
        self._fall_over(other)
        self._wake()

    def _retry(self) -> None:
        """Send batches that failed to backends that did not see them yet."""
        for _ in range(len(self._retries)):
            batch = self._retries.popleft()
            left = _untried(batch)
            free = [one for one in left if not one.busy and not self._is_full(one.hardware)]
            if left and not free:
                self._retries.append(batch)
                continue
            self.outcomes.report_refusals(batch.drop_ended(time.monotonic()))
            if free and batch.calls:
                batch.backend, batch.error = free[0], None
                self._send(batch)
            else:
                self._fail(batch, ", and no other backend works")
            self._release(batch.version)

    def _give_up(self, queue: RequestQueue, now: float) -> None:
        """Nothing can compute a queue's calls for now: refuse them at once."""
        version = queue.version
        again = min(one.circuit.retry_at for one in version.backends)
        reasons = "; ".join(f"{one.hardware}: {one.circuit.reason}" for one in version.backends)
        text = f"every backend of {version.model} version {version.version} failed ({reasons})"
        wait_s = max(LEAST_RETRY_S, again - now)
        self._empty(queue, lambda call: NotReadyError(text, wait_s))

    def _probe_later(self, version: LoadedVersion, backend: Backend) -> None:
        delay = max(0.0, backend.circuit.retry_at - time.monotonic())
        self._loop.call_later(delay + 0.001, self._probe, version, backend)

    def _probe(self, version: LoadedVersion, backend: Backend) -> None:
        if self._ended or version.closed or not backend.circuit.probe_due(time.monotonic()):
            return
        self._occupy(version, backend)

        def ask() -> None:
            well = backend.is_well()
            self._loop.call_soon_threadsafe(self._probed, version, backend, well)

        self._workers_of(backend.hardware).submit(ask)

    def _probed(self, version: LoadedVersion, backend: Backend, well: bool) -> None:
        backend.busy = False
        self._running[backend.hardware] -= 1
        if well:
            backend.circuit.healed()
            logger.warning("%s version %s answers on %s again", version.model, version.version,
                           backend.hardware)  # fmt: skip
        else:
            backend.circuit.failed(backend.circuit.reason, time.monotonic())
            self._probe_later(version, backend)
        self._wake()
        self._release(version)

    # Around

    def _workers_of(self, hardware: str) -> Workers:
        if hardware not in self._workers:
            count = self._most_running.get(hardware, 1)
            self._workers[hardware] = Workers(count, f"compute-{hardware}")
        return self._workers[hardware]

    def _is_full(self, hardware: str) -> bool:
        return self._running[hardware] >= self._most_running.get(hardware, 1)

    def _occupy(self, version: LoadedVersion, backend: Backend) -> None:
        backend.busy = True
        version.uses += 1
        self._running[backend.hardware] += 1

    def _wake(self) -> None:
        for queue in self._waiting:
            (self._shadows if queue.is_shadow else self._ready).append(queue)
        self._waiting.clear()
        if self._ready or self._shadows or self._retries:
            self._schedule()

    def _watch(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Tell those whose time is over while the hardware is at work for others."""
        self._sweeping = False
        now = time.monotonic()
        queues = (*self._waiting, *self._shadows)
        for queue in queues:
            self._drop(queue.sweep(now))
        if queues:
            self._watch()
        if any(len(queue.version.backends) > 1 for queue in self._waiting):
            self._wake()  # the wait has become longer: others may help by now

    def _empty(self, queue: RequestQueue, error: Callable[[Call], ServingError]) -> None:
        dropped = [(*entry, error(entry[0])) for entry in queue.entries]
        queue.entries.clear()
        queue.rows = 0
        self._drop(dropped)

    def _drop(self, dropped: Dropped) -> None:
        """Refuse calls that were taken out of a queue."""
        self.requests -= len(dropped)
        self.rows -= sum(call.num_rows for call, _, _ in dropped)
        self.outcomes.report_refusals(dropped)

    def _release(self, version: LoadedVersion) -> None:
        version.uses -= 1
        if not version.uses and version.closing:
            self.idle(version)


def _untried(batch: Batch) -> list[Backend]:
    """Backends that work and did not fail to compute this batch."""
    return [
        one
        for one in batch.version.backends
        if one.circuit.closed and one.hardware not in batch.tried
    ]
