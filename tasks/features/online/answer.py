"""What an online read gives: cells decoded into columns, and how fresh each view was.

A protobuf object for each value costs more than the look-up itself. Floats have a fixed encoding,
one tag byte and the number, so a block of them is joined into one buffer that numpy reads in place.
Everything else is decoded one by one, through Feast's own conversion, remembering short values.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from feast.protos.feast.types.Value_pb2 import Value
from feast.type_map import feast_value_type_to_python_type
from feast.value_type import ValueType
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from numpy.typing import NDArray

from tasks.kernel.errors import FeatureStoreError

Column = NDArray[np.floating[Any]] | list[Any]

CellRows = Sequence[Sequence[Any]]
Span = tuple[CellRows, int, int]
"""Rows, and the first and last column (not included) of a run of cells of one type."""

NEVER = int(np.iinfo(np.int64).min)
"""Event time, in microseconds, of what was never written."""

_REMEMBERED_VALUES = 65_536
_LONGEST_REMEMBERED_BYTES = 64
_IMMUTABLE = {
    ValueType.STRING,
    ValueType.BYTES,
    ValueType.INT32,
    ValueType.INT64,
    ValueType.BOOL,
    ValueType.UNIX_TIMESTAMP,
    ValueType.UUID,
    ValueType.TIME_UUID,
    ValueType.DECIMAL,
}


class FloatBlock:
    """Decodes cells of one float type: protobuf writes a tag byte, then the number.

    Args:
        kind: FLOAT (field 6 of Feast's `Value`, 4 bytes) or DOUBLE (field 5, 8 bytes).
    """

    def __init__(self, kind: ValueType) -> None:
        self.kind = kind
        self.tag = 0x35 if kind == ValueType.FLOAT else 0x29
        number = np.dtype("<f4" if kind == ValueType.FLOAT else "<f8")
        self.layout = np.dtype([("tag", "u1"), ("number", number)])  # unaligned: as on the wire
        self.null = bytes([self.tag]) + np.array(np.nan, number).tobytes()

    def decode(self, spans: Sequence[Span]) -> list[NDArray[np.floating[Any]]]:
        """Numbers of each span, shape (columns, rows); NaN where there is no value.

        All spans are joined and read as one: a request has several, and each costs the same.
        """
        parts, num_cells = [], 0
        for rows, first, last in spans:
            size = (last - first) * self.layout.itemsize
            num_cells += len(rows) * (last - first)
            parts += [self._packed(row[first:last], size) for row in rows]
        joined = b"".join(parts)
        if len(joined) == num_cells * self.layout.itemsize:
            cells = np.frombuffer(joined, self.layout)
            if (cells["tag"] == self.tag).all():
                return self._split(cells["number"], spans)
        return [self._one_by_one(*span) for span in spans]

    def _packed(self, cells: Sequence[Any], size: int) -> bytes:
        """Cells of one row joined, nulls written as NaN."""
        try:
            joined = b"".join(cells)
        except TypeError:  # a cell that was never written
            joined = b""
        return joined if len(joined) == size else b"".join([cell or self.null for cell in cells])

    @staticmethod
    def _split(
        numbers: NDArray[np.floating[Any]], spans: Sequence[Span]
    ) -> list[NDArray[np.floating[Any]]]:
        found, at = [], 0
        for rows, first, last in spans:
            end = at + len(rows) * (last - first)
            found.append(numbers[at:end].reshape(len(rows), last - first).T)
            at = end
        return found

    def _one_by_one(self, rows: CellRows, first: int, last: int) -> NDArray[np.floating[Any]]:
        """The same for cells that hold another type than their view declares."""
        numbers = np.full((last - first, len(rows)), np.nan, self.layout["number"])
        for at, row in enumerate(rows):
            for column, cell in enumerate(row[first:last]):
                value = decode_value(cell, self.kind)
                if isinstance(value, int | float):
                    numbers[column, at] = value
                elif value is not None:
                    raise _foreign(value, "a number was")
        return numbers


def _foreign(seen: object, expected: str) -> FeatureStoreError:
    return FeatureStoreError(
        f"the online store holds the {type(seen).__name__} {seen!r} where {expected} expected; "
        "something else writes to it. Materialize the view again"
    )


def value_decoder(kind: ValueType) -> Callable[[bytes | None], Any]:
    """Function from a cell to the Python value that Feast gives for it; None for null."""
    if kind not in _IMMUTABLE:
        return lambda cell: decode_value(cell, kind)

    def decode(cell: bytes | None) -> Any:
        if cell is not None and len(cell) <= _LONGEST_REMEMBERED_BYTES:
            return _remembered(cell, kind)
        return decode_value(cell, kind)

    return decode


def decode_value(cell: bytes | None, kind: ValueType) -> Any:
    """One value as Feast gives it; None for null.

    Raises:
        FeatureStoreError: the bytes are no value of Feast.
    """
    if not cell:
        return None
    try:
        return feast_value_type_to_python_type(Value.FromString(cell), kind)
    except DecodeError as exc:
        raise _foreign(cell[:20], "a serialized Feast value was") from exc


@lru_cache(_REMEMBERED_VALUES)
def _remembered(cell: bytes, kind: ValueType) -> Any:
    return decode_value(cell, kind)


@lru_cache(_REMEMBERED_VALUES)
def protobuf_moment(cell: bytes) -> int:
    """Microseconds since 1970 of a serialized protobuf `Timestamp`; nanoseconds are cut off."""
    try:
        moment = Timestamp.FromString(cell)
    except DecodeError as exc:
        raise _foreign(cell[:20], "an event time was") from exc
    return int(moment.seconds) * 1_000_000 + int(moment.nanos) // 1_000


def moments(rows: CellRows, first: int, decode: Callable[[Any], int]) -> list[list[int]]:
    """Event times in the columns from `first` on, one list a column; `NEVER` where none is."""
    return [
        [NEVER if row[column] is None else decode(row[column]) for row in rows]
        for column in range(first, len(rows[0]))
    ]


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


class ViewAnswer(NamedTuple):
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


class OnlineAnswer(NamedTuple):
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
        times = self.event_us.view("datetime64[us]")  # NEVER is how numpy writes NaT
        return {
            view: ViewAnswer(view, times[n], self.age_s[n], self.state[n])
            for n, view in enumerate(self.view_names)
        }

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary a row, None for null, floats as Python floats: ready for JSON."""
        plain = {name: _plain(values) for name, values in self.columns.items()}
        return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]


def age_of(moments_us: NDArray[np.int64], event_us: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds from each event to the moment of the read; NaN where nothing is stored."""
    age = (moments_us - event_us) / 1e6
    age[event_us == NEVER] = np.nan
    return age


def _plain(values: Column) -> list[Any]:
    if isinstance(values, list):
        return values
    plain: list[Any] = values.tolist()
    return [None if value != value else value for value in plain]
