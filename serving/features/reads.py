"""Reads beside the event loop: a thread that answers what waits, several requests with one read.

A hand-over to a thread and back costs two wake-ups. They are plain ones here (a queue in C, one
`call_soon_threadsafe` for all requests of a read), and while a read runs, what arrives waits for
the next and shares it: a read of ten keys takes little longer than a read of one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Any

from serving.errors import (
    BadRequestError,
    ClientGoneError,
    FeaturesRefusedError,
    NotReadyError,
    OverloadedError,
    ServingError,
)
from serving.features.answer import EntityFeatures, slice_answer
from serving.features.recipe import Recipe
from serving.features.request import build_inputs
from tasks.features.online.answer import OnlineAnswer
from tasks.kernel.errors import DataContractError, FalajError, StaleFeaturesError, TransientError

logger = logging.getLogger(__name__)
MOST_WAITING = 256
"""Requests that may wait for a read; more are refused at once."""
RETRY_AFTER_S = 1.0
"""A refused client may come again after this."""

Resolved = tuple[Mapping[str, Any], EntityFeatures]
Outcome = Resolved | Exception


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits for its features.

    Attributes:
        columns: that the request gave, keys and others, one list a column.
    """

    recipe: Recipe
    columns: Mapping[str, list[Any]]
    num_rows: int
    absent: tuple[str, ...]
    future: asyncio.Future[Resolved]
    began: float = field(default_factory=time.monotonic)


@dataclass
class ReadCounters:
    """What reads came to, since the start. Written by the thread, and by the loop."""

    num_requests: int = 0
    num_rows: int = 0
    num_reads: int = 0
    num_shared: int = 0
    """Requests that shared a read with another one."""
    refused: dict[str, int] = field(default_factory=dict)


class ReadThread:
    """A thread that reads what waits.

    Args:
        max_rows: that requests which share a read may have together.
        moment: of a read that begins now; None for the wall clock.
    """

    def __init__(self, max_rows: int, moment: Callable[[], datetime | None]) -> None:
        self._max_rows, self._moment = max_rows, moment
        self._queue: SimpleQueue[Waiting | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="entity-reads", daemon=True)
        self.num_waiting = 0
        self.counters = ReadCounters()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the reads that wait."""
        self._queue.put(None)
        self._thread.join()

    async def read(
        self, recipe: Recipe, columns: Mapping[str, list[Any]], num_rows: int, absent: Sequence[str]
    ) -> Resolved:
        """Inputs and features of one request; on the event loop.

        Raises:
            OverloadedError: as many wait as may.
            ServingError: as `serving.interfaces.EntityReader.resolve` says.
        """
        if self.num_waiting >= MOST_WAITING:
            self._count_refusal("overloaded")
            raise OverloadedError(
                f"{self.num_waiting} requests wait for features, as many as may. Nothing was read; "
                f"come again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )
        future: asyncio.Future[Resolved] = asyncio.get_running_loop().create_future()
        self.num_waiting += 1
        self._queue.put(Waiting(recipe, columns, num_rows, tuple(absent), future))
        return await future

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            for group in _by_recipe(self._take(first)):
                self._report(group, self._answer(group))

    def _take(self, first: Waiting) -> list[Waiting]:
        """The request and what waits behind it, as far as one read goes."""
        taken, rows = [first], first.num_rows
        while rows < self._max_rows:
            try:
                further = self._queue.get_nowait()
            except Empty:
                break
            if further is None:  # the end: what was taken is still answered
                self._queue.put(None)
                break
            taken.append(further)
            rows += further.num_rows
        return taken

    def _answer(self, group: list[Waiting]) -> list[Outcome]:
        wanted = [w for w in group if not w.future.cancelled()]
        if len(wanted) > 1:
            try:
                return _spread(group, wanted, self._read(wanted))
            except (DataContractError, StaleFeaturesError):
                pass  # one of them is at fault; each is told its own
            except Exception as exc:
                return [self._explained(exc)] * len(group)
        return [self._alone(w) for w in group]

    def _alone(self, waiting: Waiting) -> Outcome:
        if waiting.future.cancelled():
            return _nobody()
        try:
            return _made(waiting, self._read([waiting]))
        except Exception as exc:
            return self._explained(exc)

    def _read(self, wanted: list[Waiting]) -> OnlineAnswer:
        recipe = wanted[0].recipe
        keys = {name: [value for w in wanted for value in w.columns[name]] for name in recipe.keys}
        answer = recipe.reader.read(keys, self._moment())
        with self._lock:
            self.counters.num_reads += 1
            self.counters.num_requests += len(wanted)
            self.counters.num_rows += answer.num_rows
            self.counters.num_shared += len(wanted) if len(wanted) > 1 else 0
        return answer

    def _explained(self, exc: Exception) -> ServingError:
        error = _as_ours(exc)
        self._count_refusal(error.reason)
        return error

    def _count_refusal(self, reason: str) -> None:
        with self._lock:
            self.counters.refused[reason] = self.counters.refused.get(reason, 0) + 1

    def _report(self, group: list[Waiting], outcomes: list[Outcome]) -> None:
        try:
            group[0].future.get_loop().call_soon_threadsafe(self._settle, group, outcomes)
        except RuntimeError:  # the loop was closed; nobody waits any more
            logger.debug("%d entity reads ended after their loop", len(group))

    def _settle(self, group: list[Waiting], outcomes: list[Outcome]) -> None:
        self.num_waiting -= len(group)
        for waiting, outcome in zip(group, outcomes, strict=True):
            if waiting.future.done():
                continue
            if isinstance(outcome, Exception):
                waiting.future.set_exception(outcome)
            else:
                waiting.future.set_result(outcome)


def _by_recipe(taken: list[Waiting]) -> list[list[Waiting]]:
    if len(taken) == 1:
        return [taken]
    groups: dict[int, list[Waiting]] = {}
    for waiting in taken:
        groups.setdefault(id(waiting.recipe), []).append(waiting)
    return list(groups.values())


def _spread(group: list[Waiting], wanted: list[Waiting], answer: OnlineAnswer) -> list[Outcome]:
    """Each request's rows of a shared answer; those that were given up get none."""
    made: dict[int, Outcome] = {}
    start = 0
    for waiting in wanted:
        stop = start + waiting.num_rows
        try:
            made[id(waiting)] = _made(waiting, slice_answer(answer, start, stop))
        except BadRequestError as exc:
            made[id(waiting)] = exc
        start = stop
    return [made.get(id(waiting)) or _nobody() for waiting in group]


def _nobody() -> ServingError:
    """For a future that was cancelled, and so never told."""
    return ClientGoneError("nobody waits for these features any more")


def _made(waiting: Waiting, answer: OnlineAnswer) -> Resolved:
    recipe = waiting.recipe
    columns = {**answer.columns, **waiting.columns}
    inputs = build_inputs(recipe.columns, columns, waiting.num_rows)
    features = EntityFeatures(
        model=recipe.model,
        version=recipe.version,
        service=recipe.service,
        views=recipe.views,
        answer=answer,
        given=waiting.columns,
        absent=waiting.absent,
        began=waiting.began,
        ended=time.monotonic(),
    )
    return inputs, features


def _as_ours(exc: Exception) -> ServingError:
    """The error of a read as its client sees it; what is nobody's plan goes to the log too."""
    if isinstance(exc, ServingError):
        return exc
    if isinstance(exc, DataContractError):
        return BadRequestError(str(exc))
    if isinstance(exc, StaleFeaturesError):
        return FeaturesRefusedError(str(exc))
    if isinstance(exc, TransientError):
        return NotReadyError(str(exc), RETRY_AFTER_S)
    if isinstance(exc, FalajError):
        logger.error("features could not be read: %s", exc)
        return NotReadyError(str(exc))
    logger.error("a read of features failed unexpectedly", exc_info=exc)
    return ServingError(
        f"features could not be read ({type(exc).__name__}); the server's log says more. Nothing "
        "was computed"
    )
