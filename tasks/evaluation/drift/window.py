"""Columns of one window, one column in memory at a time, rows in order of their UTC day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
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
    """The rows of a Parquet file in a time window, by column; only their row groups are read.

    Args:
        path: Parquet file.
        event_time: its column of UTC times.
        window: the rows to take.

    Raises:
        DataContractError: the file lacks the event time.
    """

    def __init__(self, path: Path, event_time: str, window: TimeWindow) -> None:
        self._file = pq.ParquetFile(path)
        self._window = window
        if event_time not in self._file.schema_arrow.names:
            raise DataContractError(
                f"{path.name} lacks the event time {event_time!r}; it has the columns "
                f"{', '.join(self._file.schema_arrow.names[:10])}"
            )
        column = self._file.read(columns=[event_time], use_threads=False).column(0)
        times = np.asarray(column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()))
        start, end = (int(t.timestamp() * 1_000_000) for t in (window.start, window.end))
        rows = np.flatnonzero((times >= start) & (times < end))
        dates = times[rows] // (SECONDS_PER_DAY * 1_000_000)
        order = np.argsort(dates, kind="stable")
        self.dates, self.starts, self.days = np.unique(
            dates[order], return_index=True, return_inverse=True
        )
        self._groups, self._rows = self._within_groups(rows[order])
        self._loaded = pa.table({})

    def _within_groups(self, rows: NDArray[np.intp]) -> tuple[list[int], slice | NDArray[np.intp]]:
        """Row groups that hold some rows, and where the rows are in these, as a slice if they can.

        The file's rows are in order of time as a rule, so a window is one stretch of them.
        """
        metadata = self._file.metadata
        sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        firsts = np.cumsum([0, *sizes])
        holding = np.searchsorted(firsts, rows, side="right") - 1
        groups, which = np.unique(holding, return_inverse=True)
        begins = np.cumsum([0, *(sizes[group] for group in groups)])
        places = rows - firsts[holding] + begins[which]
        if len(places) and (np.diff(places) == 1).all():
            return groups.tolist(), slice(int(places[0]), int(places[-1]) + 1)
        return groups.tolist(), places

    @property
    def num_rows(self) -> int:
        """Rows of the window."""
        return len(self.days)

    @property
    def num_days(self) -> int:
        """UTC days that have rows."""
        return len(self.dates)

    def load(self, names: Sequence[str]) -> None:
        """Read several columns at once, which takes half the time; the ones before are let go."""
        present = [name for name in names if name in self._file.schema_arrow.names]
        self._loaded = self._file.read_row_groups(self._groups, columns=present, use_threads=False)

    def numbers(self, name: str) -> Numbers:
        """A numeric column."""
        column = self._read(name)
        if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            raise DataContractError(
                f"column {name!r} holds {column.type}, expected numbers ({self._window})"
            )
        if column.type != pa.float32():
            column = column.cast(pa.float64())
        return Numbers(self, column.to_numpy()[self._rows])

    def categories(self, name: str) -> Categories:
        """A category column; an empty string is missing."""
        column = pc.cast(self._read(name), pa.string())
        column = pc.if_else(pc.equal(column, ""), None, column)
        coded: Any = column.combine_chunks().dictionary_encode()
        positions = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)[self._rows]
        return Categories(positions.astype(np.intp), coded.dictionary.to_pylist())

    def _read(self, name: str) -> pa.ChunkedArray:
        if name not in self._loaded.column_names:
            self.load([name])
        if name not in self._loaded.column_names:
            raise DataContractError(
                f"the rows of {self._window} lack column {name!r}; expected all columns of the "
                "reference. Build the snapshot with the model's feature service"
            )
        return self._loaded.column(name)


class Numbers:
    """A numeric column of one window, sorted once: every statistic is read off that order.

    Args:
        window: whose rows it has.
        values: in the order of the window's days, NaN for missing, shape (rows,).
    """

    def __init__(self, window: WindowColumns, values: NDArray[Any]) -> None:
        self.window, self.values = window, values
        num_missing = int(np.count_nonzero(np.isnan(values)))
        known = np.where(np.isnan(values), np.float32(np.nan), values) if num_missing else values
        order = _order(known)[: len(values) - num_missing]
        self.ranked: Float64Array = values[order].astype(np.float64)
        """Known values, lowest first."""
        self.ranked_days: NDArray[np.uint16] = window.days.astype(np.uint16)[order]
        """Day of each of them."""

    def by_day(self) -> tuple[Float64Array, NDArray[np.intp]]:
        """Finite values by UTC day, in each lowest first; and how many each day has."""
        first = np.searchsorted(self.ranked, -np.inf, "right")
        last = np.searchsorted(self.ranked, np.inf, "left")
        values, days = self.ranked[first:last], self.ranked_days[first:last]
        values = values[np.argsort(days, kind="stable")]
        return values, np.bincount(days, minlength=self.window.num_days)


def _order(values: NDArray[Any]) -> NDArray[np.intp]:
    """Where the values are from the lowest to the highest, NaN last.

    Numbers of 32 bits are sorted by their lower and then their upper half, which numpy does by
    counting: 3.7 ms for 160,000 rows against 9.5 ms by comparing.
    """
    if values.dtype != np.float32:
        return np.argsort(values)
    bits = values.view(np.int32)
    keys = (bits ^ (bits >> 31 | np.int32(-(1 << 31)))).view(np.uint32)
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    return order[np.argsort((keys >> 16).astype(np.uint16)[order], kind="stable")]
