"""Columns of one window, one column in memory at a time, rows in order of their UTC day."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError

SECONDS_PER_DAY = 86_400
Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class Categories:
    """A category column.

    Args:
        positions: of each row's category in `names`, -1 for missing, shape (rows,).
        names: the categories that occur.
    """

    positions: NDArray[np.intp]
    names: list[str]

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each category."""
        sizes = np.bincount(self.positions[self.positions >= 0], minlength=len(self.names))
        return dict(zip(self.names, sizes.tolist(), strict=True))

    def numbered(self, numbers: dict[str, int], default: float = np.nan) -> Float64Array:
        """The rows as numbers of another list; NaN for missing."""
        table = np.array([*(numbers.get(name, default) for name in self.names), np.nan])
        return table[self.positions]


class WindowColumns:
    """The rows of a Parquet file in a time window, by column.

    Args:
        path: Parquet file.
        event_time: its column of UTC times.
        window: the rows to take.

    Raises:
        DataContractError: the file lacks the event time.
    """

    def __init__(self, path: Path, event_time: str, window: TimeWindow) -> None:
        self._data = ds.dataset(path, format="parquet")
        self._window = window
        if event_time not in self._data.schema.names:
            raise DataContractError(
                f"{path.name} lacks the event time {event_time!r}; it has the columns "
                f"{', '.join(self._data.schema.names[:10])}"
            )
        time = ds.field(event_time)
        self._filter = (time >= window.start) & (time < window.end)
        times = self._read(event_time).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        dates = np.asarray(times) // (SECONDS_PER_DAY * 1_000_000)
        self._order = np.argsort(dates, kind="stable")
        self.dates, starts, days = np.unique(
            dates[self._order], return_index=True, return_inverse=True
        )
        self.starts: NDArray[np.intp] = starts
        self.days: NDArray[np.intp] = days

    @property
    def num_rows(self) -> int:
        """Rows of the window."""
        return len(self.days)

    @property
    def num_days(self) -> int:
        """UTC days that have rows."""
        return len(self.dates)

    def numbers(self, name: str) -> Float64Array:
        """A numeric column; missing is NaN."""
        column = self._read(name)
        if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            raise DataContractError(
                f"column {name!r} holds {column.type}, expected numbers ({self._window})"
            )
        values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return np.asarray(values, dtype=np.float64)[self._order]

    def categories(self, name: str) -> Categories:
        """A category column; an empty string is missing."""
        column = pc.cast(self._read(name), pa.string())
        column = pc.if_else(pc.equal(column, ""), None, column)
        coded: Any = column.combine_chunks().dictionary_encode()
        positions = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return Categories(positions.astype(np.intp)[self._order], coded.dictionary.to_pylist())

    def known_by_day(self, values: Float64Array) -> Iterator[tuple[int, Float64Array]]:
        """Each UTC day, as days since 1970, with those of its `values` that are finite."""
        for date, part in zip(self.dates, np.split(values, self.starts[1:]), strict=True):
            yield int(date), part[np.isfinite(part)]

    def _read(self, name: str) -> pa.ChunkedArray:
        if name not in self._data.schema.names:
            raise DataContractError(
                f"the rows of {self._window} lack column {name!r}; expected all columns of the "
                "reference. Build the snapshot with the model's feature service"
            )
        return self._data.to_table(columns=[name], filter=self._filter).column(0)
