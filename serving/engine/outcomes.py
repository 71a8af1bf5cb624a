"""Hands over what became of calls: answers, refusals, and batches to observers.

A receiver or an observer that raises takes nobody else's outcome with it, and holds up no queue. On
the event loop's thread alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from serving.engine.queues import Batch, Dropped
from serving.engine.versions import LoadedVersion
from serving.errors import NotComputedError, ServingError
from serving.interfaces import Answer, Array, Call, Done, Observer, Served, ServedBatch

logger = logging.getLogger(__name__)


class Outcomes:
    """The last step of every call.

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
        self.notify(
            batch.calls, batch.inputs, version, output, served, batch.started, batch.finished
        )

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

    def notify(
        self,
        calls: list[Call],
        inputs: dict[str, Array],
        version: LoadedVersion,
        output: Array,
        served: Served,
        started: float,
        finished: float,
    ) -> None:
        """Show the observers what was computed and handed over."""
        if not self._observers:
            return
        batch = ServedBatch(
            tuple(calls), inputs, {version.output: output}, served, started, finished, time.time()
        )
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
