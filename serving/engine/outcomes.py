"""Hands over what became of calls: answers, refusals, and batches to observers.

A receiver or an observer that raises takes nobody else's outcome with it, and holds up no queue. On
the event loop's thread alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence

from serving.engine.backends import Tally
from serving.engine.queues import Batch, Dropped
from serving.engine.versions import LoadedVersion
from serving.errors import NotComputedError, ServingError, UnknownModelError
from serving.interfaces import Answer, Array, Call, Done, Observer, ServedBatch, Track

logger = logging.getLogger(__name__)


class Outcomes:
    """The last step of every call.

    Args:
        loop: that everything happens on.
        observers: notified of every batch and refusal, in this order.

    Attributes:
        refused: calls by model, track and the word of the refusal.
        num_lost: outcomes whose receiver raised.
        num_unseen: batches and refusals that an observer raised on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer]) -> None:
        self.refused: Counter[tuple[str, Track, str]] = Counter()
        self.num_lost = self.num_unseen = 0
        self._loop = loop
        self._observers = observers

    def refuse(self, call: Call, done: Done, error: ServingError) -> None:
        """Report in the next turn of the loop that a call is not answered."""
        self._loop.call_soon(self.report_refusal, call, done, error)

    def deliver(self, batch: Batch) -> None:
        """Give each call its rows of a computed batch, count them, and notify the observers."""
        tally = batch.version.tally(batch.backend, batch.track, batch.passed_over)
        version, output, start = batch.version, batch.output, 0
        for call, done in zip(batch.calls, batch.dones, strict=True):
            end = start + call.num_rows
            try:
                done(call, Answer({version.output: output[start:end]}, tally.served))
            except Exception:  # of a protocol: the other calls get their answers
                self.lost(call)
            start = end
        self.count(batch.calls, batch.inputs, version, output, tally, batch.started, batch.finished)

    def deliver_singly(self, batch: Batch) -> None:
        """Hand over what was found when a batch failed on a backend that answers its probe."""
        version = batch.version
        for alone in batch.singly:
            if alone.error is None:
                self.deliver(alone)
                continue
            self.report_refusal(alone.calls[0], alone.dones[0], NotComputedError(
                f"{version.model} version {version.version} cannot compute these inputs: "
                f"{sentence_of(alone.error)}. It answers others, so look at the values"
            ))  # fmt: skip

    def lost(self, call: Call) -> None:
        """A receiver raised; called while that is being handled."""
        self.num_lost += 1
        logger.exception("the outcome of request %s could not be handed over", call.request_id)

    def count(
        self,
        calls: list[Call],
        inputs: dict[str, Array],
        version: LoadedVersion,
        output: Array,
        tally: Tally,
        started: float,
        finished: float,
    ) -> None:
        """Count what was computed and handed over, and notify the observers."""
        tally.batches += 1
        tally.calls += len(calls)
        tally.rows += output.shape[0]
        tally.seconds += finished - started
        if not self._observers:
            return
        batch = ServedBatch(
            tuple(calls), inputs, {version.output: output}, tally.served, started, finished,
            time.time(),
        )  # fmt: skip
        for observer in self._observers:
            try:
                observer.served(batch)
            except Exception:  # it promised not to; the others and the queue go on
                self._unseen()

    def report_refusals(self, dropped: Dropped) -> None:
        """Report now that calls are not answered."""
        for call, done, error in dropped:
            self.report_refusal(call, done, error)

    def report_refusal(self, call: Call, done: Done, error: ServingError) -> None:
        """Report now that a call is not answered, and why; never within its submission."""
        # A name that means nothing here is not counted by itself: clients could send any number.
        model = "" if isinstance(error, UnknownModelError) else call.model
        self.refused[model, call.track, error.reason] += 1
        try:
            done(call, error)
        except Exception:  # of a protocol: others hear of theirs all the same
            self.lost(call)
        for observer in self._observers:
            try:
                observer.refused(call, error)
            except Exception:  # as above
                self._unseen()

    def _unseen(self) -> None:
        self.num_unseen += 1
        logger.exception("an observer raised")


def sentence_of(error: Exception) -> str:
    """The first line of what an exception says, without its full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")
