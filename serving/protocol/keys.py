"""Requests that name entities: columns of texts or numbers, one value a row."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from serving.calls import Array
from serving.errors import BadRequestError
from serving.protocol.messages import (
    BYTES,
    KNOWN,
    NUMPY_OF,
    InferRequest,
    InputTensor,
    refuse_infinite,
)
from serving.protocol.plans import binary_part, refuse_left_over, refuse_odd_source

MOST_TEXT = 4096
"""Characters of one value: keys go to the online store, and given columns into the log."""
_TEXTS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[str | None])
_WHOLE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[int | None])
_NUMBERS: dict[str, msgspec.json.Decoder[Any]] = {
    "i": _WHOLE,
    "u": _WHOLE,
    "f": msgspec.json.Decoder(list[float | None]),
    "b": msgspec.json.Decoder(list[bool | None]),
}


def read_columns(request: InferRequest, binary: memoryview | None) -> dict[str, list[Any]]:
    """Columns of a request by entities: keys, and inputs that no feature view holds.

    Which columns there have to be is the entity reader's to judge.

    Raises:
        BadRequestError: one is there twice, or is no column.
    """
    found: dict[str, list[Any]] = {}
    position = 0
    for tensor in request.inputs:
        refuse_twice(tensor.name, found)
        if tensor.parameters is None or tensor.parameters.binary_data_size is None:
            refuse_odd_source(tensor)
            found[tensor.name] = _from_json(tensor)
        else:
            data, position = binary_part(tensor, binary, position)
            found[tensor.name] = _from_binary(tensor, data)
    refuse_left_over(binary, position)
    check_lengths(found)
    return found


def refuse_twice(name: str, found: Mapping[str, object]) -> None:
    """Refuse a column that was there already.

    Raises:
        BadRequestError: it was.
    """
    if name in found:
        raise BadRequestError(f"input {name[:100]!r} is in the request twice")


def check_lengths(found: Mapping[str, Sequence[Any]]) -> None:
    """Refuse columns that differ in length, and texts that no key is as long as.

    Raises:
        BadRequestError: they do, or one is.
    """
    for name, values in found.items():
        if any(isinstance(value, str) and len(value) > MOST_TEXT for value in values):
            raise BadRequestError(
                f"input {name[:100]!r} has a text of more than {MOST_TEXT} characters"
            )
    lengths = {name[:100]: len(values) for name, values in found.items()}
    if len(set(lengths.values())) != 1:
        raise BadRequestError(
            f"the columns of the request have {lengths} values; expected one a row of each"
        )


def texts_of(name: str, values: Sequence[bytes]) -> list[str]:
    """Texts of BYTES values.

    Raises:
        BadRequestError: one is no UTF-8.
    """
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as exc:
        raise BadRequestError(f"input {name!r} has a value that is no UTF-8: {exc}") from exc


def split_bytes(name: str, data: memoryview) -> list[bytes]:
    """BYTES values of a binary tensor: each is its length in four bytes, then itself.

    Raises:
        BadRequestError: a length reaches behind the data.
    """
    values: list[bytes] = []
    position = 0
    while position < len(data):
        if position + 4 > len(data):
            raise BadRequestError(f"input {name!r}: its binary data ends inside a length")
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        if position + length > len(data):
            raise BadRequestError(
                f"input {name!r}: a value of {length} bytes reaches behind its binary data"
            )
        values.append(bytes(data[position : position + length]))
        position += length
    return values


def numbers_type(name: str, datatype: str) -> np.dtype[np.generic]:
    """Type of a column of numbers.

    Raises:
        BadRequestError: the datatype is none of numbers.
    """
    sent = NUMPY_OF.get(datatype)
    if sent is None:
        raise BadRequestError(
            f"input {name[:100]!r} has datatype {datatype[:40]!r}; expected BYTES or one of {KNOWN}"
        )
    return sent


def _from_json(tensor: InputTensor) -> list[Any]:
    size = _size(tensor)
    decoder = _TEXTS
    if tensor.datatype != BYTES:
        decoder = _NUMBERS[numbers_type(tensor.name, tensor.datatype).kind]
    try:
        values: list[Any] = decoder.decode(tensor.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequestError(
            f"input {tensor.name[:100]!r}: its data is not what a column of {tensor.datatype} "
            f"takes: {exc}"
        ) from exc
    return _of_size(tensor, values, size)


def _from_binary(tensor: InputTensor, data: memoryview) -> list[Any]:
    size = _size(tensor)
    if tensor.datatype == BYTES:
        return _of_size(tensor, texts_of(tensor.name, split_bytes(tensor.name, data)), size)
    sent = numbers_type(tensor.name, tensor.datatype)
    if len(data) != size * sent.itemsize:
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has {len(data)} bytes of binary data; shape "
            f"{tensor.shape} of {tensor.datatype} takes {size * sent.itemsize}"
        )
    return values_of(tensor.name, np.frombuffer(data, sent))


def values_of(name: str, column: Array) -> list[Any]:
    """Numbers as plain values; NaN is a missing one, as `null` is in JSON.

    Raises:
        BadRequestError: one is infinite.
    """
    refuse_infinite(name[:100], column)
    return [None if value != value else value for value in column.tolist()]


def _size(tensor: InputTensor) -> int:
    """Rows of a column, whose shape is [rows] or [rows, 1]."""
    shape = tensor.shape
    if len(shape) not in (1, 2) or shape[0] < 1 or shape[1:] not in ([], [1]):
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has shape {shape}; a request by entities has columns, "
            "of shape [rows] or [rows, 1]"
        )
    return math.prod(shape)


def _of_size(tensor: InputTensor, values: list[Any], size: int) -> list[Any]:
    if len(values) != size:
        raise BadRequestError(
            f"input {tensor.name[:100]!r} has {len(values)} values; its shape {tensor.shape} takes "
            f"{size}"
        )
    return values
