"""The queue of one track of a model: bounded, first come first served, the dead dropped on the way.

A queue is on the event loop's thread alone. Its requests are computed together as a batch, there or
on a worker's thread.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.engine.versions import Backend, LoadedVersion
from serving.errors import ClientGoneError, DeadlineError, NotComputedError, ServingError
from serving.interfaces import Answer, Array, Call, Done, Observer, ServedBatch, Track

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine that no installation has a reason to change; tests take smaller ones.

    Attributes:
        requests, rows: that may wait in one track of a model; past them a request is refused.
        total_requests, total_rows: that may wait in the process.
        shadow_share: part of these bounds that mirrored requests get.
        inline_ms: a batch that is expected to take less runs on the event loop's thread.
        batch_s: a batch on a thread that takes longer is given up: its backend counts as failed.
        poll_s: between two looks at the registry.
        retry_s, most_retry_s: until a version that could not be loaded is tried again; each failure
            doubles it.
    """

    requests: int = 256
    rows: int = 65_536
    total_requests: int = 1024
    total_rows: int = 262_144
    shadow_share: float = 0.25
    inline_ms: float = 1.5
    batch_s: float = 30.0
    poll_s: float = 3.0
    retry_s: float = 5.0
    most_retry_s: float = 300.0


PACE_HOLDS_S = 1.0
"""How long the pace of a queue that has emptied since is believed."""
_SHARE = 0.25  # of a new measurement in the moving estimates
Entry = tuple[Call, Done]
Dropped = list[tuple[Call, Done, ServingError]]


class RequestQueue:
    """Calls that wait for one version, which may be changed while they wait.

    Args:
        version: that answers them; the queue counts as one of its uses while it holds calls.
        track: as answers name it. Answers of `shadow` are thrown away: it gets less room, and
            computes after all others.
        limits: of queues.
        goal_ms: of the model's answers.

    Attributes:
        share: of the bounds that the queue gets.
        together: calls of a batch, moving estimate of what was seen while others waited.
        waiting_since: when a batch was taken that left others waiting; 0 where none do.
        listed: whether it waits for its turn.
    """

    def __init__(
        self, version: LoadedVersion, track: Track, limits: Limits, goal_ms: float = 50.0
    ) -> None:
        self.version = version
        self.track = track
        self.is_shadow = track == "shadow"
        self.share = limits.shadow_share if self.is_shadow else 1.0
        self.entries: deque[Entry] = deque()
        self.rows = 0
        self.most_requests = max(1, int(limits.requests * self.share))
        self.most_rows = max(1, int(limits.rows * self.share))
        self.goal_ms = goal_ms
        self.together = float(limits.requests)
        self._pace_ms = self.waiting_since = self._noted_at = 0.0
        self.listed = False

    def take(self, most_rows: int, now: float) -> tuple[list[Call], list[Done], int, Dropped]:
        """The next calls that can be computed together, their rows, and what nobody waits for.

        Args:
            most_rows: of the batch; a call with more comes alone.
            now: on `time.monotonic()`.
        """
        entries, version = self.entries, self.version
        calls: list[Call] = []
        dones: list[Done] = []
        dropped: Dropped = []
        rows = 0
        lengths = None
        passed: list[Entry] = []
        while entries:
            entry = entries.popleft()
            call, done = entry
            if call.is_over(now):
                self.rows -= call.num_rows
                dropped.append((call, done, ended(call)))
                continue
            if calls and rows + call.num_rows > most_rows:
                entries.appendleft(entry)
                break
            if version.has_free_axes:
                if lengths is None:
                    lengths = version.lengths(call)
                elif version.lengths(call) != lengths:
                    passed.append(entry)
                    continue
            rows += call.num_rows
            calls.append(call)
            dones.append(done)
        if passed:
            entries.extendleft(reversed(passed))
        self.rows -= rows
        return calls, dones, rows, dropped

    def note_taken(self, num_calls: int, now: float) -> None:
        """A batch was taken: measure the pace of the queue where calls have waited meanwhile.

        That is the time of a turn of the loop, with all that is read and refused in it, and not
        only what the model takes.
        """
        if self.waiting_since:
            ms = (now - self.waiting_since) * 1e3
            self._pace_ms += _SHARE * (ms - self._pace_ms) if self._pace_ms else ms
            self._noted_at = now
        if self.entries or self.waiting_since:
            self.together += _SHARE * (num_calls - self.together)
        self.waiting_since = now if self.entries else 0.0

    def pace_ms(self, now: float) -> float:
        """Time from one batch to the next while calls wait; 0 where it was not seen lately."""
        return self._pace_ms if now - self._noted_at < PACE_HOLDS_S else 0.0

    def sweep(self, now: float) -> Dropped:
        """Take out the calls that nobody waits for."""
        dropped = [(*e, ended(e[0])) for e in self.entries if e[0].is_over(now)]
        if dropped:
            self.entries = deque(e for e in self.entries if not e[0].is_over(now))
            self.rows -= sum(call.num_rows for call, _, _ in dropped)
        return dropped


def ended(call: Call) -> ServingError:
    """Why a call is not computed any more."""
    if call.is_gone:
        return ClientGoneError(f"the client of request {call.request_id} closed its connection")
    return DeadlineError(
        f"request {call.request_id} was not begun before its deadline; nothing was computed"
    )


def contiguous(call: Call, names: tuple[str, ...]) -> dict[str, Array]:
    """Inputs of one call, copied only where they are not contiguous, in the order of `names`."""
    arrays = {}
    inputs = call.inputs
    for name in names:
        array = inputs[name]
        arrays[name] = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return arrays


@dataclass(eq=False, slots=True)
class Batch:
    """One computation. A worker fills in the outcome; then the event loop reads it.

    Attributes:
        queue: that the calls came from, and go back to where another backend can compute them.
        fell_over_from: hardware that is preferred and failed before.
        error: why it failed; None where `output` holds the answers.
        backend_is_well: after a failure, whether the backend answers its probe.
        abandoned: it took too long, and its calls went elsewhere; what comes of it is dropped.
        singly: after a failure of a backend that is well, each call as a batch of its own.
    """

    queue: RequestQueue
    version: LoadedVersion
    calls: list[Call]
    dones: list[Done]
    rows: int
    backend: Backend
    fell_over_from: str = ""
    error: Exception | None = None
    backend_is_well: bool = False
    abandoned: bool = False
    singly: Sequence["Batch"] = ()
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
        calls, names = self.calls, self.version.names
        self.started = time.monotonic()
        try:
            self.inputs = (
                contiguous(calls[0], names)
                if len(calls) == 1
                else {n: np.concatenate([call.inputs[n] for call in calls]) for n in names}
            )
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
                self.queue, self.version, [call], [done], call.num_rows, self.backend,
                self.fell_over_from,
            )  # fmt: skip
            alone.compute()
            if alone.error is not None:
                self.backend_is_well = self.backend.is_well()
            singly.append(alone)


class Outcomes:
    """Hands over what became of calls: answers, refusals, and batches to observers.

    A receiver or an observer that raises takes nobody else's outcome with it, and stops no queue.

    Args:
        loop: that everything happens on.
        observers: notified of every batch and refusal, in this order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer]) -> None:
        self._loop = loop
        self._observers = observers

    def refuse(self, call: Call, done: Done, error: ServingError) -> None:
        """Report in the next turn of the loop that a call is not answered."""
        self._loop.call_soon(self.report_refusals, [(call, done, error)])

    def deliver(self, batch: Batch) -> None:
        """Give each call its rows of a computed batch, and notify the observers."""
        version, output, start = batch.version, batch.output, 0
        served = version.served(batch.backend, batch.queue.track, batch.fell_over_from)
        for call, done in zip(batch.calls, batch.dones, strict=True):
            end = start + call.num_rows
            self.hand_over(call, done, Answer({version.output: output[start:end]}, served))
            start = end
        times = batch.started, batch.finished, time.time()
        outputs = {version.output: output}
        self.notify(ServedBatch(tuple(batch.calls), batch.inputs, outputs, served, *times))

    def deliver_singly(self, batch: Batch) -> None:
        """Hand over what was found when a batch failed on a backend that answers its probe."""
        version = batch.version
        for alone in batch.singly:
            if alone.error is None:
                self.deliver(alone)
                continue
            error = NotComputedError(
                f"{version.model} version {version.version} cannot compute these inputs: "
                f"{sentence_of(alone.error)}. It answers others, so look at the values"
            )
            self.report_refusals([(alone.calls[0], alone.dones[0], error)])

    def hand_over(self, call: Call, done: Done, outcome: Answer | ServingError) -> None:
        """Tell whoever submitted a call what became of it."""
        try:
            done(call, outcome)
        except Exception:  # of a protocol: the other calls get their answers
            logger.exception("the outcome of request %s could not be handed over", call.request_id)

    def notify(self, batch: ServedBatch) -> None:
        """Show the observers what was computed and handed over."""
        for observer in self._observers:
            try:
                observer.served(batch)
            except Exception:  # it promised not to; the others and the queue go on
                logger.exception("an observer raised")

    def report_refusals(self, dropped: Dropped) -> None:
        """Report now that calls are not answered, and why; never within their submission."""
        for call, done, error in dropped:
            self.hand_over(call, done, error)
            for observer in self._observers:
                try:
                    observer.refused(call, error)
                except Exception:  # as above
                    logger.exception("an observer raised")


def sentence_of(error: Exception) -> str:
    """The first line of what an exception says, without its full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")
