"""Decode what an online store keeps, Feast's serialized protobuf values, a block at a time.

A protobuf object for each value costs more than the look-up itself. Floats have a fixed encoding,
one tag byte and the number, so a block of them is joined into one buffer that numpy reads in place.
Everything else is decoded one by one, through Feast's own conversion, remembering short values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from feast.protos.feast.types.Value_pb2 import Value
from feast.type_map import feast_value_type_to_python_type
from feast.value_type import ValueType
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from numpy.typing import NDArray

from tasks.kernel.errors import FeatureStoreError

Cell = bytes | None
Row = Sequence[Any]

Span = tuple[Sequence[Row], int, int]
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

    def _packed(self, cells: Row, size: int) -> bytes:
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

    def _one_by_one(self, rows: Sequence[Row], first: int, last: int) -> NDArray[np.floating[Any]]:
        """The same for cells that hold another type than their view declares."""
        numbers = np.full((last - first, len(rows)), np.nan, self.layout["number"])
        for at, row in enumerate(rows):
            for column, cell in enumerate(row[first:last]):
                value = decode_value(cell, self.kind)
                if isinstance(value, int | float):
                    numbers[column, at] = value
                elif value is not None:
                    raise FeatureStoreError(
                        f"the online store holds the {type(value).__name__} {value!r} where a "
                        "number was expected; something else writes to it. Materialize the view "
                        "again"
                    )
        return numbers


def value_decoder(kind: ValueType) -> Callable[[Cell], Any]:
    """Function from a cell to the Python value that Feast gives for it; None for null."""
    if kind not in _IMMUTABLE:
        return lambda cell: decode_value(cell, kind)

    def decode(cell: Cell) -> Any:
        if cell is not None and len(cell) <= _LONGEST_REMEMBERED_BYTES:
            return _remembered(cell, kind)
        return decode_value(cell, kind)

    return decode


def decode_value(cell: Cell, kind: ValueType) -> Any:
    """One value as Feast gives it; None for null.

    Raises:
        FeatureStoreError: the bytes are no value of Feast.
    """
    if not cell:
        return None
    try:
        return feast_value_type_to_python_type(Value.FromString(cell), kind)
    except DecodeError as exc:
        raise FeatureStoreError(
            f"the online store holds {cell[:20]!r} where a serialized Feast value was expected; "
            "something else writes to it. Materialize the view again"
        ) from exc


@lru_cache(_REMEMBERED_VALUES)
def _remembered(cell: bytes, kind: ValueType) -> Any:
    return decode_value(cell, kind)


@lru_cache(_REMEMBERED_VALUES)
def protobuf_moment(cell: bytes) -> int:
    """Microseconds since 1970 of a serialized protobuf `Timestamp`; nanoseconds are cut off."""
    try:
        moment = Timestamp.FromString(cell)
    except DecodeError as exc:
        raise FeatureStoreError(
            f"the online store holds {cell[:20]!r} where an event time was expected; something "
            "else writes to it. Materialize the view again"
        ) from exc
    return int(moment.seconds) * 1_000_000 + int(moment.nanos) // 1_000


def moments(rows: Sequence[Row], first: int, decode: Callable[[Any], int]) -> list[list[int]]:
    """Event times in the columns from `first` on, one list a column; `NEVER` where none is."""
    return [
        [NEVER if row[column] is None else decode(row[column]) for row in rows]
        for column in range(first, len(rows[0]))
    ]
