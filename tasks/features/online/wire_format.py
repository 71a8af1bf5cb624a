"""Byte strings of whole columns: protobuf's wire format laid out by numpy and Arrow.

Every function makes one byte string for each row, as an Arrow array that holds them one after the
other. Layout: protobuf's encoding specification.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
BINARY = pa.large_binary()

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""


def binary_array(data: Bytes, lengths: Integers) -> pa.LargeBinaryArray:
    """Array of byte strings that lie one after the other in `data`."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return from_offsets(offsets, data)


def contents(array: pa.LargeBinaryArray) -> tuple[Integers, Bytes]:
    """Offsets, starting at 0, and the bytes of an array without nulls; nothing is copied."""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
    if data is None:
        return ends - ends[0], np.zeros(0, np.uint8)
    return ends - ends[0], np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def join_parts(parts: Sequence[pa.Array | pa.Scalar], num_rows: int) -> pa.LargeBinaryArray:
    """Concatenate the parts of every row; a constant is the same in all rows."""
    merged: list[pa.Array | pa.Scalar] = []
    for part in parts:
        if merged and isinstance(part, pa.Scalar) and isinstance(merged[-1], pa.Scalar):
            merged[-1] = constant(merged[-1].as_py() + part.as_py())
        else:
            merged.append(part)
    if isinstance(merged[0], pa.Scalar) and len(merged) == 1:
        return pa.array([merged[0].as_py()] * num_rows, BINARY)
    return pc.binary_join_element_wise(*merged, constant(b""))


def constant(text: bytes) -> pa.Scalar:
    """A part that is the same in all rows."""
    return pa.scalar(text, BINARY)


def fixed(
    tag: bytes, values: npt.NDArray[np.generic], present: npt.NDArray[np.bool_] | None
) -> pa.LargeBinaryArray:
    """Tag and little-endian bytes of every value; nothing where it is not present."""
    kept = values if present is None else values[present]
    width = len(tag) + kept.itemsize
    table = np.empty((len(kept), width), np.uint8)
    table[:, : len(tag)] = np.frombuffer(tag, np.uint8)
    table[:, len(tag) :] = np.ascontiguousarray(kept).view(np.uint8).reshape(-1, kept.itemsize)
    if present is None:
        return from_offsets(np.arange(len(values) + 1, dtype=np.int64) * width, table.reshape(-1))
    return binary_array(table.reshape(-1), present.astype(np.int64) * width)


def tagged_varints(
    tag: bytes, values: Integers, present: npt.NDArray[np.bool_]
) -> pa.LargeBinaryArray:
    """Tag and varint of every value; nothing where it is not present."""
    table, lengths = _varints(values, tag)
    lengths *= present
    return binary_array(table[np.arange(table.shape[1]) < lengths[:, None]], lengths)


def varint_array(values: Integers) -> pa.LargeBinaryArray:
    """Varint of every value; a negative one takes ten bytes."""
    return tagged_varints(b"", values, np.ones(len(values), bool))


def _varints(values: Integers, tag: bytes) -> tuple[Bytes, Integers]:
    """One row of bytes for each value, padded to the right, and how many of them count."""
    rest = values.astype(np.int64).view(np.uint64)
    lengths = np.ones(len(values), np.int64)
    longest = 1
    while longest < 10 and (more := rest >= np.uint64(1 << 7 * longest)).any():
        lengths += more
        longest += 1
    table = np.empty((len(values), len(tag) + longest), np.uint8)
    table[:, : len(tag)] = np.frombuffer(tag, np.uint8)
    for place in range(longest):
        group = (rest >> np.uint64(7 * place)).astype(np.uint8) & np.uint8(0x7F)
        table[:, len(tag) + place] = group | (lengths > place + 1).astype(np.uint8) << 7
    return table, lengths + len(tag)


def delimited(tag: bytes, column: pa.Array) -> pa.LargeBinaryArray:
    """Tag, length and bytes of every value; nothing where it is null."""
    data = as_binary(column)
    lengths = pc.fill_null(pc.binary_length(data), 0).to_numpy(zero_copy_only=False)
    heads = tagged_varints(tag, lengths, present_rows(column))
    return join_parts(
        [heads, data if not data.null_count else pc.fill_null(data, b"")], len(column)
    )


def as_binary(column: pa.Array) -> pa.LargeBinaryArray:
    """Texts or byte strings of any kind as the one kind that is used here."""
    return pc.cast(column, BINARY)


def from_offsets(offsets: Integers, data: Bytes) -> pa.LargeBinaryArray:
    """Array whose row `i` is `data[offsets[i]:offsets[i + 1]]`; the bytes are not copied."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.LargeBinaryArray.from_buffers(BINARY, len(offsets) - 1, buffers)


def present_rows(column: pa.Array) -> npt.NDArray[np.bool_]:
    """True where a row is not null."""
    valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid
