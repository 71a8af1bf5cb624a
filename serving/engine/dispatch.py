"""Takes calls out of their queues, computes them together, and hands over the answers.

A call is queued and one flush is scheduled for the next turn of the event loop; a flush takes what
is queued by then, so what arrives together is computed together and batching adds no latency. A
batch that is expected to be short runs right there, a longer one on a worker's thread while the
queue grows. A turn takes a few milliseconds of batches: then the loop reads what else came, and
refuses what would wait too long.
"""

import _thread
import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from serving.config import EngineConfig
from serving.engine.queues import (
    Batch,
    Dropped,
    Limits,
    Outcomes,
    RequestQueue,
    contiguous,
    sentence_of,
)
from serving.engine.versions import Backend, LoadedVersion
from serving.errors import BackendError, NotReadyError, OverloadedError, ServingError, TooLargeError
from serving.interfaces import Answer, Call, Done, Observer, ServedBatch, settle

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
        self._scheduled = self._sweeping = self._ended = False
        self._flushed_at = 0.0
        self._healing: set[asyncio.Task[None]] = set()
        self._running: Counter[str] = Counter()
        self._most_running = {one.name: one.workers for one in config.hardware}
        self._batch_rows = config.batch_rows

    # Queueing

    def queue(self, queue: RequestQueue, call: Call, done: Done) -> None:
        """Put a call into a queue, or refuse it in the next turn of the loop."""
        rows, limits, share = call.num_rows, self._limits, queue.share
        if (
            len(queue.entries) >= queue.most_requests
            or queue.rows + rows > queue.most_rows
            or self.requests >= limits.total_requests * share
            or self.rows + rows > limits.total_rows * share
        ):
            self.outcomes.refuse(call, done, self._overloaded(queue, rows))
            return
        if (error := self.too_long(queue)) is not None:
            self.outcomes.refuse(call, done, error)
            return
        queue.entries.append((call, done))
        queue.rows += rows
        self.rows += rows
        self.requests += 1
        if not queue.listed:
            self._list(queue)

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
        if not batches or wait_ms <= max(queue.goal_ms / 2, DEEP * each_ms):
            return None
        return OverloadedError(
            f"one more request would wait {wait_ms:.0f} ms for {queue.version.model} "
            f"({queue.track}), whose goal is {queue.goal_ms:g} ms; nothing was computed, come "
            "again",
            retry_after_s=max(LEAST_RETRY_S, wait_ms / 1e3),
        )

    def _ahead(self, queue: RequestQueue) -> tuple[int, float]:
        """Batches before one more call, and what the model takes for each, in ms."""
        version, times = queue.version, queue.version.backends[0].times
        if not version.has_free_axes:
            full = self._batch_rows * version.row_size
            return queue.rows // self._batch_rows, times.expected_ms(full)
        num = len(queue.entries)
        if not num:
            return 0, 0.0
        first = queue.entries[0][0]
        together = max(1.0, queue.together)
        rows = min(queue.rows / num * min(together, num), self._batch_rows)
        return int(num / together), times.expected_ms(round(rows * version.size_of(first)))

    def _overloaded(self, queue: RequestQueue, rows: int) -> ServingError:
        most = int(min(queue.most_rows, self._limits.total_rows * queue.share))
        if rows > most:
            return TooLargeError(
                f"{rows} rows were sent, at most {most} may wait; send fewer in one request"
            )
        batches, each_ms = self._ahead(queue)
        return OverloadedError(
            f"{len(queue.entries)} requests with {queue.rows} rows wait for {queue.version.model} "
            f"({queue.track}), {self.requests} in all; nothing was computed, come again",
            retry_after_s=max(LEAST_RETRY_S, (1 + batches) * each_ms / 1e3),
        )

    def retarget(self, queue: RequestQueue, version: LoadedVersion) -> None:
        """Let another version answer what waits in a queue and what comes."""
        former = queue.version
        queue.version = version
        if queue.listed and former is not version:
            version.uses += 1
            self._release(former)

    async def drained(self, limit_s: float) -> None:
        """Wait until nothing waits and nothing runs, for at most so long."""
        deadline = time.monotonic() + limit_s
        while (self.requests or self._running.total()) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    def abandon(self, error: Callable[[Call], ServingError]) -> None:
        """Refuse everything that waits, and start nothing any more."""
        self._ended = True
        for queue in (*self._ready, *self._shadows, *self._waiting):
            self._empty(queue, error)

    def close(self) -> None:
        """Ask no failed backend any more."""
        for task in self._healing:
            task.cancel()

    def _list(self, queue: RequestQueue) -> None:
        """Give a queue its turns, until it is empty."""
        queue.listed = True
        queue.version.uses += 1
        (self._shadows if queue.is_shadow else self._ready).append(queue)
        self._schedule()

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
        if len(queue.entries) == 1 and self._serve_one(queue, version):
            return True
        now = time.monotonic()
        backend = _first_working(version)
        if backend is None:
            self._give_up(queue, now)
            return True
        size = version.row_size or version.size_of(queue.entries[0][0])
        expected_ms = backend.times.expected_ms(min(queue.rows, self._batch_rows) * size)
        is_short = expected_ms < self._limits.inline_ms
        if backend.busy or (self._is_full(backend.hardware) and not is_short):
            return False
        queued = queue.rows
        calls, dones, rows, dropped = queue.take(self._batch_rows, now)
        queue.note_taken(len(calls), now)
        self.requests -= len(calls) + len(dropped)
        self.rows -= queued - queue.rows
        self.outcomes.report_refusals(dropped)
        if not calls:
            return True
        preferred = version.backends[0]
        fell_over_from = "" if backend is preferred else preferred.hardware
        batch = Batch(queue, version, calls, dones, rows, backend, fell_over_from)
        expected_ms = backend.times.expected_ms(batch.size)
        if expected_ms < self._limits.inline_ms or self._is_starved(queue, expected_ms, now):
            batch.compute()
            if batch.error is None:
                self._deliver(batch)
                return True
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
            self._send(Batch(queue, version, [call], [done], rows, backend, error=exc))
            return True
        finished = time.monotonic()
        backend.times.note(size, (finished - started) * 1e3)
        served = backend.served.get((queue.track, "")) or version.served(backend, queue.track, "")
        outputs, times = {version.output: output}, (started, finished, time.time())
        self.outcomes.hand_over(call, done, Answer(outputs, served))
        self.outcomes.notify(ServedBatch((call,), inputs, outputs, served, *times))
        return True

    def _send(self, batch: Batch) -> None:
        """Have a batch computed on a thread, or looked into there where it failed."""

        def work() -> None:
            if batch.error is None:
                batch.compute()
            if batch.error is not None:
                batch.examine()
            self._call_soon(self._finished, batch)

        try:
            self._occupy(batch.version, batch.backend, work)
        except RuntimeError as exc:  # no thread is to be had
            self._fall_over(batch, exc)
            self._start_healing(batch.version, batch.backend)
        else:
            batch.timer = self._loop.call_later(self._limits.batch_s, self._overdue, batch)

    def _finished(self, batch: Batch) -> None:
        backend, version = batch.backend, batch.version
        assert batch.timer is not None
        batch.timer.cancel()
        backend.busy = False
        if batch.abandoned:
            self._start_healing(version, backend)
        else:
            self._running[backend.hardware] -= 1
            if batch.error is None:
                self._deliver(batch)
            elif batch.backend_is_well:
                self.outcomes.deliver_singly(batch)
            else:
                self._fall_over(batch, batch.error)
                self._start_healing(version, backend)
            self._wake()
        self._release(version)

    def _deliver(self, batch: Batch) -> None:
        batch.backend.times.note(batch.size, (batch.finished - batch.started) * 1e3)
        self.outcomes.deliver(batch)

    # Failing

    def _fall_over(self, batch: Batch, error: Exception) -> None:
        """A backend does not answer its own probe: keep away from it, and ask the next one."""
        backend, version, now = batch.backend, batch.version, time.monotonic()
        backend.failures += 1
        backend.circuit.failed(sentence_of(error), now)
        logger.warning(
            "%s version %s: %s on %s failed (%s) and is tried again in %.1f s",
            version.model, version.version, backend.variant, backend.hardware,
            backend.circuit.reason, backend.circuit.retry_at - now,
        )  # fmt: skip
        queue, entries = batch.queue, list(zip(batch.calls, batch.dones, strict=True))
        if _first_working(queue.version) is None:
            failed = BackendError(
                f"{version.model} version {version.version} could not be computed on "
                f"{backend.hardware}: {backend.circuit.reason}"
            )
            self.outcomes.report_refusals([(call, done, failed) for call, done in entries])
            return
        queue.entries.extendleft(reversed(entries))
        queue.rows += batch.rows
        self.requests += len(entries)
        self.rows += batch.rows
        if not queue.listed:
            self._list(queue)

    def _overdue(self, batch: Batch) -> None:
        """A thread does not come back with a batch: leave it to that, and compute it elsewhere.

        The backend is asked again when the thread did come back.
        """
        batch.abandoned = True
        self._running[batch.backend.hardware] -= 1
        self._fall_over(batch, TimeoutError(f"no answer within {self._limits.batch_s:g} s"))
        self._wake()

    def _give_up(self, queue: RequestQueue, now: float) -> None:
        """Nothing can compute a queue's calls for now: refuse them at once."""
        version = queue.version
        again = min(one.circuit.retry_at for one in version.backends)
        reasons = "; ".join(f"{one.hardware}: {one.circuit.reason}" for one in version.backends)
        text = f"every backend of {version.model} version {version.version} failed ({reasons})"
        wait_s = max(LEAST_RETRY_S, again - now)
        self._empty(queue, lambda call: NotReadyError(text, wait_s))

    async def _heal(self, version: LoadedVersion, backend: Backend) -> None:
        """Ask a backend that failed whether it is well, at longer and longer times, until it is."""
        circuit = backend.circuit
        while not circuit.closed:
            await asyncio.sleep(max(0.0, circuit.retry_at - time.monotonic()))
            if self._ended or version.closed:
                return
            answer: asyncio.Future[bool] = self._loop.create_future()

            def ask(answer: asyncio.Future[bool] = answer) -> None:
                self._call_soon(settle, answer, backend.is_well())

            try:
                self._occupy(version, backend, ask)
            except RuntimeError:  # no thread is to be had
                circuit.failed(circuit.reason, time.monotonic())
                continue
            is_well = await answer
            backend.busy = False
            self._running[backend.hardware] -= 1
            if is_well:
                circuit.healed()
                which = (version.model, version.version, backend.hardware)
                logger.warning("%s version %s answers on %s again", *which)
            else:
                circuit.failed(circuit.reason, time.monotonic())
            self._wake()
            self._release(version)

    def _start_healing(self, version: LoadedVersion, backend: Backend) -> None:
        task = self._loop.create_task(self._heal(version, backend))
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    # Around

    def _call_soon(self, what: Callable[..., None], *arguments: object) -> None:
        """Go on upon the loop; nothing is left to do where that has ended meanwhile."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *arguments)

    def _is_full(self, hardware: str) -> bool:
        return self._running[hardware] >= self._most_running.get(hardware, 1)

    def _occupy(self, version: LoadedVersion, backend: Backend, job: Callable[[], None]) -> None:
        """Keep a backend at work on a thread; one that hangs keeps no process from ending."""
        # Of `threading`, `start` would hold up the loop until the new thread runs.
        _thread.start_new_thread(job, ())
        backend.busy = True  # after what can fail; the job's outcome comes by the loop, thus later
        version.uses += 1
        self._running[backend.hardware] += 1

    def _wake(self) -> None:
        for queue in self._waiting:
            (self._shadows if queue.is_shadow else self._ready).append(queue)
        self._waiting.clear()
        if self._ready or self._shadows:
            self._schedule()

    def _watch(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Refuse those whose time is over while the hardware is at work for others."""
        self._sweeping = False
        now = time.monotonic()
        queues = (*self._waiting, *self._shadows)
        for queue in queues:
            self._drop(queue.sweep(now))
        if queues:
            self._watch()

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


def _first_working(version: LoadedVersion) -> Backend | None:
    return next((one for one in version.backends if one.circuit.closed), None)
