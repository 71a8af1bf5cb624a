"""What an online read answers: values as columns, and how fresh each view was for each row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.features.online.decoding import NEVER

Column = NDArray[np.floating[Any]] | list[Any]


class Freshness(IntEnum):
    """State of one view for one row of a request, at the moment of the read."""

    FRESH = 0
    """Not older than the view's TTL, edge included, as in historical retrieval."""
    STALE = 1
    """Older than the TTL."""
    MISSING = 2
    """Never written for this key, or a part of the key is null."""
    AHEAD = 3
    """Of a moment after the read: at a replayed moment, the future."""

    @property
    def label(self) -> str:
        """Lower-case name, as metrics and logs say it."""
        return self.name.lower()


LABELS = [state.label for state in Freshness]


@dataclass(frozen=True)
class ViewAnswer:
    """Freshness of one view, one entry a row of the request.

    Attributes:
        name: of the view.
        event_time: moment from which the values were true; NaT where there are none.
        age_s: seconds from then to the read; NaN where there are no values.
        state: `Freshness`, as uint8.
    """

    name: str
    event_time: NDArray[np.datetime64]
    age_s: NDArray[np.float64]
    state: NDArray[np.uint8]

    @property
    def labels(self) -> list[str]:
        """State of each row in words."""
        return [LABELS[code] for code in self.state]


@dataclass(frozen=True)
class OnlineAnswer:
    """Features of one request, rows in the order asked.

    Attributes:
        service: feature service that was read.
        num_rows: rows of the request.
        columns: name to values. Float features are float32 or float64 arrays with NaN for null;
            others are lists of Python values, as Feast gives them, with None for null.
        view_names: views of the service, the order of the first axis of what follows.
        event_us: microseconds since 1970, shape (views, rows); `NEVER` where nothing is stored.
        age_s: seconds, shape (views, rows); NaN where nothing is stored.
        state: `Freshness` as uint8, shape (views, rows).
        moments_us: moment of the read, microseconds since 1970, one for all rows or one a row.
    """

    service: str
    num_rows: int
    columns: dict[str, Column]
    view_names: tuple[str, ...]
    event_us: NDArray[np.int64]
    age_s: NDArray[np.float64]
    state: NDArray[np.uint8]
    moments_us: NDArray[np.int64]

    @property
    def views(self) -> dict[str, ViewAnswer]:
        """Freshness by view."""
        return {
            name: ViewAnswer(
                name,
                _event_times(self.event_us[position]),
                self.age_s[position],
                self.state[position],
            )
            for position, name in enumerate(self.view_names)
        }

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary a row, None for null, floats as Python floats: ready for JSON."""
        plain = {name: _plain(values) for name, values in self.columns.items()}
        return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]

    def to_arrow(self) -> pa.Table:
        """The columns as an Arrow table, null where there is no value."""
        return pa.table(
            {
                name: pa.array(values, from_pandas=isinstance(values, np.ndarray))
                for name, values in self.columns.items()
            }
        )


def age_of(moments_us: NDArray[np.int64], event_us: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds from each event to the moment of the read; NaN where nothing is stored."""
    age = (moments_us - event_us) / 1e6
    age[event_us == NEVER] = np.nan
    return age


def _event_times(event_us: NDArray[np.int64]) -> NDArray[np.datetime64]:
    return event_us.view("datetime64[us]")  # NEVER is how numpy writes NaT


def _plain(values: Column) -> list[Any]:
    if isinstance(values, list):
        return values
    plain: list[Any] = values.tolist()
    return [None if value != value else value for value in plain]
