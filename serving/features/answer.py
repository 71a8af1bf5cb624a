"""What was read for a request that named entities, kept with its call and told in its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from tasks.features.online.answer import LABELS, NEVER, OnlineAnswer

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ViewUsed:
    """One feature view as a model version is served with it.

    Attributes:
        version: Feast's number of the definition that is read.
        definition: digest of that definition.
        is_as_trained: whether the model was trained with the same one.
    """

    name: str
    version: int
    definition: str
    is_as_trained: bool


@dataclass(frozen=True, slots=True)
class EntityFeatures:
    """Features of one call, rows in its order.

    Attributes:
        model: for which they were read, with its version.
        service: feature service as registered, version included.
        views: definitions that were read, in the order of `answer.view_names`.
        answer: values, ages and states.
        given: columns that the request itself gave, keys included.
        absent: inputs that nobody gave; missing values to the model.
        began: `time.monotonic()` when the request began to wait for its features; `ended` when they
            were there.
    """

    model: str
    version: str
    service: str
    views: tuple[ViewUsed, ...]
    answer: OnlineAnswer
    given: Mapping[str, Sequence[Any]]
    absent: tuple[str, ...] = ()
    began: float = 0.0
    ended: float = 0.0

    def states(self) -> dict[str, list[str]]:
        """View to its state in each row: `fresh`, `stale`, `missing` or `ahead`."""
        return {
            name: [LABELS[code] for code in codes]
            for name, codes in zip(self.answer.view_names, self.answer.state.tolist(), strict=True)
        }

    def report(self) -> dict[str, Any]:
        """JSON-ready: values by column, and for each view its version, times, ages and states."""
        answer, states = self.answer, self.states()
        ages = [_without_nan(row) for row in answer.age_s.round(6).tolist()]
        views = {
            view.name: {
                "version": view.version,
                "definition": view.definition,
                "as_trained": view.is_as_trained,
                "event_time": [_moment(us) for us in event_us],
                "age_s": age,
                "state": states[view.name],
            }
            for view, event_us, age in zip(self.views, answer.event_us.tolist(), ages, strict=True)
        }
        return {
            "service": self.service,
            "trained_version": self.version,
            "read_at": _moment(int(answer.moments_us[0])),
            "views": views,
            "features": {name: _plain(values) for name, values in answer.columns.items()},
            "given": {name: _plain(values) for name, values in self.given.items()},
            "absent": list(self.absent),
        }


def slice_answer(answer: OnlineAnswer, start: int, stop: int) -> OnlineAnswer:
    """Rows `start` to `stop` of an answer that several requests share."""
    if start == 0 and stop == answer.num_rows:
        return answer
    rows = slice(start, stop)
    return OnlineAnswer(
        service=answer.service,
        num_rows=stop - start,
        columns={name: values[rows] for name, values in answer.columns.items()},
        view_names=answer.view_names,
        event_us=answer.event_us[:, rows],
        age_s=answer.age_s[:, rows],
        state=answer.state[:, rows],
        moments_us=answer.moments_us,
    )


def _moment(microseconds: int) -> str | None:
    if microseconds == NEVER:
        return None
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat()


def _without_nan(values: list[Any]) -> list[Any]:
    return [None if value != value else value for value in values]


def _plain(values: Any) -> list[Any]:
    if isinstance(values, np.ndarray):
        return _without_nan(values.tolist())
    return [_plain_value(value) for value in values]


def _plain_value(value: Any) -> Any:
    if value is None or value != value:
        return None
    return value if isinstance(value, str | int | float | bool) else str(value)
