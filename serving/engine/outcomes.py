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

from serving.calls import Answer, Array, Call, ServedBatch, Slot
from serving.engine.backends import Backend, Tally
from serving.engine.batches import Batch
from serving.engine.queues import Dropped
from serving.engine.versions import LoadedVersion
from serving.errors import NotComputedError, ServingError, UnknownModelError
from serving.interfaces import Done, Observer

logger = logging.getLogger(__name__)


class Outcomes:
    """The last step of every call.

    Args:
        loop: that everything happens on.
        observers: told of every batch and refusal, in this order.

    Attributes:
        refused: calls by model, slot and the word of the refusal.
        num_lost: outcomes whose receiver raised.
        num_unseen: batches and refusals that an observer raised on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer]) -> None:
        self.refused: Counter[tuple[str, Slot, str]] = Counter()
        self.num_lost = self.num_unseen = 0
        self._loop = loop
        self._observers = observers

    def refuse(self, call: Call, done: Done, error: ServingError) -> None:
        """Tell in the next turn of the loop that a call is not answered."""
        self._loop.call_soon(self.report_refusal, call, done, error)

    def deliver(
        self,
        slot: Slot,
        version: LoadedVersion,
        backend: Backend,
        passed_over: str,
        calls: list[Call],
        dones: list[Done],
        inputs: dict[str, Array],
        output: Array,
        started: float,
        finished: float,
    ) -> None:
        """Give each call its rows of a batch, count them, and tell the observers."""
        tally = version.tally(backend, slot, passed_over)
        served, name = tally.served, version.output
        if len(calls) == 1:
            try:
                dones[0](calls[0], Answer({name: output}, served))
            except Exception:  # of a protocol: the other calls get their answers
                self.lost(calls[0])
        else:
            start = 0
            for call, done in zip(calls, dones, strict=True):
                end = start + call.num_rows
                try:
                    done(call, Answer({name: output[start:end]}, served))
                except Exception:  # as above
                    self.lost(call)
                start = end
        tally.batches += 1
        tally.calls += len(calls)
        tally.rows += output.shape[0]
        tally.seconds += finished - started
        if self._observers:
            self.report_batch(calls, inputs, version, output, tally, started, finished)

    def report_batch(
        self,
        calls: list[Call],
        inputs: dict[str, Array],
        version: LoadedVersion,
        output: Array,
        tally: Tally,
        started: float,
        finished: float,
    ) -> None:
        """Tell what was computed; after its answers."""
        batch = ServedBatch(
            tuple(calls), inputs, {version.output: output}, tally.served, started, finished,
            time.time(),
        )  # fmt: skip
        for observer in self._observers:
            try:
                observer.served(batch)
            except Exception:  # it promised not to; the others and the queue go on
                self._unseen()

    def deliver_singly(self, batch: Batch) -> None:
        """Hand over what was found when a batch failed on a backend that answers its probe."""
        version, backend = batch.version, batch.backend
        assert backend is not None
        for call, done, outcome in zip(batch.calls, batch.dones, batch.singly, strict=True):
            if isinstance(outcome, Exception):
                self.report_refusal(call, done, NotComputedError(
                    f"{version.model} version {version.version} cannot compute these inputs: "
                    f"{sentence_of(outcome)}. It answers others, so look at the values"
                ))  # fmt: skip
                continue
            inputs, output, started, finished = outcome
            self.deliver(
                batch.slot, version, backend, batch.passed_over, [call], [done], inputs, output,
                started, finished,
            )  # fmt: skip

    def report_refusals(self, dropped: Dropped) -> None:
        """Tell now that calls are not answered."""
        for call, done, error in dropped:
            self.report_refusal(call, done, error)

    def report_refusal(self, call: Call, done: Done, error: ServingError) -> None:
        """Tell now that a call is not answered, and why; never within its submission."""
        # A name that means nothing here is not counted by itself: clients could send any number.
        model = "" if isinstance(error, UnknownModelError) else call.model
        self.refused[model, call.slot, error.reason] += 1
        try:
            done(call, error)
        except Exception:  # of a protocol: others are told all the same
            self.lost(call)
        for observer in self._observers:
            try:
                observer.refused(call, error)
            except Exception:  # as above
                self._unseen()

    def _unseen(self) -> None:
        self.num_unseen += 1
        logger.exception("an observer raised")

    def lost(self, call: Call) -> None:
        """A receiver raised; called while that is being handled."""
        self.num_lost += 1
        logger.exception("the outcome of request %s could not be handed over", call.request_id)


def sentence_of(error: Exception) -> str:
    """The first line of what an exception says, without its full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")
