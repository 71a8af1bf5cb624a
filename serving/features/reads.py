"""Reads beside the event loop: what waits is answered by a thread, several requests with one read.

While a read runs, what arrives waits for the next and shares it: a read of ten keys takes little
longer than a read of one.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from serving import errors
from serving.features.recipe import Recipe, build_inputs
from serving.interfaces import settle
from tasks.features.online.answer import LABELS, NEVER, OnlineAnswer
from tasks.kernel.errors import DataContractError, FalajError, StaleFeaturesError, TransientError

logger = logging.getLogger(__name__)
MOST_WAITING = 256
"""Requests that may wait for a read; more are refused at once."""
RETRY_AFTER_S = 1.0
"""A refused client may come again after this."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class EntityFeatures:
    """What was read for one call, rows in its order; kept with the call and reported in its answer.

    Attributes:
        recipe: of the version for which it was read.
        answer: values, ages and states.
        given: columns that the request itself gave, keys included.
        began: `time.monotonic()` when the request began to wait for its features; `ended` when they
            were there.
    """

    recipe: Recipe
    answer: OnlineAnswer
    given: Mapping[str, Sequence[Any]]
    began: float = 0.0
    ended: float = 0.0

    def report(self) -> dict[str, Any]:
        """JSON-ready: values by column, and for each view its version, times, ages and states."""
        answer, recipe = self.answer, self.recipe
        ages = answer.age_s.round(6).tolist()
        moments, states = answer.event_us.tolist(), answer.state.tolist()
        views = {
            view.name: {
                "version": view.version,
                "definition": view.definition,
                "event_time": [_moment(us) for us in event_us],
                "age_s": _plain(age),
                "state": [LABELS[code] for code in codes],
            }
            for view, event_us, age, codes in zip(recipe.views, moments, ages, states, strict=True)
        }
        return {
            "service": recipe.service,
            "trained_version": recipe.version,
            "read_at": _moment(int(answer.moments_us[0])),
            "views": views,
            "features": {name: _plain(values) for name, values in answer.columns.items()},
            "given": {name: _plain(values) for name, values in self.given.items()},
        }


def _moment(microseconds: int) -> str | None:
    if microseconds == NEVER:
        return None
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat()


def _plain(values: Any) -> list[Any]:
    """Values as JSON has them; NaN is null."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    return [
        None if v != v else v if v is None or isinstance(v, str | int | float) else str(v)
        for v in values
    ]


Resolved = tuple[Mapping[str, Any], EntityFeatures]
Outcome = Resolved | errors.ServingError


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits for its features.

    Attributes:
        columns: that the request gave, keys and others, one list a column.
    """

    recipe: Recipe
    columns: Mapping[str, list[Any]]
    num_rows: int
    future: asyncio.Future[Resolved]
    began: float = field(default_factory=time.monotonic)


class SharedReads:
    """Reads what waits, on a thread; everything else is for the event loop.

    Args:
        max_rows: that requests which share a read may have together.
        moment: of a read that begins now; None for the wall clock.

    Attributes:
        waiting: requests whose read has not begun.
        counted: requests, rows, reads, and requests that shared a read with another one.
        refused: requests by the word of the refusal.
    """

    def __init__(self, max_rows: int, moment: Callable[[], datetime | None]) -> None:
        self._max_rows, self._moment = max_rows, moment
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="entity-reads")
        self.waiting: deque[Waiting] = deque()
        self._reading: asyncio.Task[None] | None = None
        self.counted = dict.fromkeys(("requests", "rows", "reads", "shared"), 0)
        self.refused: Counter[str] = Counter()

    async def stop(self) -> None:
        """End after the reads that wait."""
        if self._reading is not None:
            await self._reading
        await asyncio.to_thread(self._thread.shutdown)

    async def read(
        self, recipe: Recipe, columns: Mapping[str, list[Any]], num_rows: int
    ) -> Resolved:
        """Inputs and features of one request.

        Raises:
            OverloadedError: as many wait as may.
            ServingError: as `FeastEntityReader.resolve` says.
        """
        if len(self.waiting) >= MOST_WAITING:
            self.refused["overloaded"] += 1
            raise errors.OverloadedError(
                f"{len(self.waiting)} requests wait for features, as many as may. Nothing was "
                f"read; come again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )
        waiting = Waiting(recipe, columns, num_rows, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_all(), name="entity-reads")
        return await waiting.future

    async def _read_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting:
            if not (group := self._next()):
                continue
            outcomes = await loop.run_in_executor(self._thread, self._answers, group)
            self.counted["reads"] += 1
            self.counted["requests"] += len(group)
            self.counted["rows"] += sum(waiting.num_rows for waiting in group)
            self.counted["shared"] += len(group) if len(group) > 1 else 0
            for waiting, outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, errors.ServingError):
                    self.refused[outcome.reason] += 1
                settle(waiting.future, outcome)

    def _next(self) -> list[Waiting]:
        """Requests of one version that one read answers; those that were given up are let go."""
        recipe, rows = self.waiting[0].recipe, 0
        group: list[Waiting] = []
        others: list[Waiting] = []
        while self.waiting and rows < self._max_rows:
            waiting = self.waiting.popleft()
            if waiting.recipe is not recipe:
                others.append(waiting)
            elif not waiting.future.done():
                group.append(waiting)
                rows += waiting.num_rows
        self.waiting.extendleft(reversed(others))
        return group

    # On the thread

    def _answers(self, group: list[Waiting]) -> list[Outcome]:
        recipe = group[0].recipe
        keys = {name: [value for w in group for value in w.columns[name]] for name in recipe.keys}
        try:
            answer = recipe.reader.read(keys, self._moment())
        except Exception as exc:
            is_of_one = isinstance(exc, DataContractError | StaleFeaturesError)
            if is_of_one and len(group) > 1:  # each gets its own fault alone
                return [self._answers([waiting])[0] for waiting in group]
            return [_as_ours(exc)] * len(group)
        outcomes, start = [], 0
        for waiting in group:
            stop = start + waiting.num_rows
            outcomes.append(_made(waiting, _rows_of(answer, start, stop)))
            start = stop
        return outcomes


def _rows_of(answer: OnlineAnswer, start: int, stop: int) -> OnlineAnswer:
    """Rows `start` to `stop` of an answer that several requests share."""
    rows = slice(start, stop)
    return answer._replace(
        num_rows=stop - start,
        columns={name: values[rows] for name, values in answer.columns.items()},
        event_us=answer.event_us[:, rows],
        age_s=answer.age_s[:, rows],
        state=answer.state[:, rows],
    )


def _made(waiting: Waiting, answer: OnlineAnswer) -> Outcome:
    columns: dict[str, Any] = {**answer.columns, **waiting.columns}
    try:
        for column, encoder in waiting.recipe.encoders.items():
            columns |= encoder.columns(columns[column])
        inputs = build_inputs(waiting.recipe.columns, columns, waiting.num_rows)
    except (errors.BadRequestError, DataContractError) as exc:
        return exc if isinstance(exc, errors.BadRequestError) else errors.BadRequestError(str(exc))
    times = (waiting.began, time.monotonic())
    features = EntityFeatures(waiting.recipe, answer, waiting.columns, *times)
    return inputs, features


def _as_ours(exc: Exception) -> errors.ServingError:
    """The error of a read as its client sees it; what nobody expects goes to the log too."""
    if isinstance(exc, DataContractError):
        return errors.BadRequestError(str(exc))
    if isinstance(exc, StaleFeaturesError):
        return errors.FeaturesRefusedError(str(exc))
    if isinstance(exc, TransientError):
        return errors.NotReadyError(str(exc), RETRY_AFTER_S)
    if isinstance(exc, FalajError):
        logger.error("features could not be read: %s", exc)
        return errors.NotReadyError(str(exc))
    logger.error("a read of features failed unexpectedly", exc_info=exc)
    return errors.ServingError(
        f"features could not be read ({type(exc).__name__}); the server's log says more. Nothing "
        "was computed"
    )
