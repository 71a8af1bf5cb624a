"""One input of a request, however a protocol brought it, as an array or as a column of values."""

import math
import struct
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from serving.errors import BadRequestError
from serving.interfaces import Array

BYTES = "BYTES"
NUMPY_OF: dict[str, np.dtype[np.generic]] = {"BOOL": np.dtype(np.bool_)} | {
    f"{name}{bits}": np.dtype(f"<{kind}{bits // 8}")
    for name, kind, least in (("UINT", "u", 8), ("INT", "i", 8), ("FP", "f", 16))
    for bits in (8, 16, 32, 64)
    if bits >= least
}
"""Datatypes of numbers, as they lie in binary tensors."""
DATATYPE_OF = {dtype: name for name, dtype in NUMPY_OF.items()}
MOST_TEXT = 4096
"""Characters of one value: keys go to the online store, and given columns into the log."""
_ITEM = {"f": float | None, "i": int, "u": int, "b": bool}


class Sent(NamedTuple):
    """One input as it was sent: its values are in exactly one of the last three.

    Attributes:
        text: a JSON list, flat or nested as the shape says; `null` is a missing number.
        raw: little-endian; texts each behind their length in four bytes.
        items: values that the protocol itself has typed; texts as UTF-8.
    """

    name: str
    datatype: str
    shape: list[int]
    text: msgspec.Raw | None = None
    raw: memoryview | None = None
    items: Sequence[Any] | None = None


def refused(name: str, what: str) -> BadRequestError:
    """An input that is not taken, and why."""
    return BadRequestError(f"input {name[:100]!r} {what}")


def array_of(sent: Sent) -> Array:
    """Its numbers in their own datatype; may be written to.

    Args:
        sent: whose shape was checked: no length in it is negative.

    Raises:
        BadRequestError: they are not as many as the shape says, infinite, or no such numbers.
    """
    dtype = NUMPY_OF.get(sent.datatype)
    if dtype is None:
        known = ", ".join(NUMPY_OF)
        raise refused(sent.name, f"has datatype {sent.datatype[:40]!r}; expected one of {known}")
    try:
        if sent.text is not None:
            array = _array_of_json(sent.text, dtype, len(sent.shape))
        elif sent.raw is not None:
            array = _array_of_raw(sent.raw, dtype)
        else:
            array = np.array(list(sent.items or ()), dtype)  # a list: else numpy wraps numbers
    except (OverflowError, FloatingPointError) as exc:
        raise refused(sent.name, f"has a number beyond {sent.datatype}: {exc}") from exc
    except ValueError as exc:  # of msgspec and numpy too
        raise refused(sent.name, f"has data that {sent.datatype} does not take: {exc}") from exc
    if array.size != math.prod(sent.shape) or (array.ndim > 1 and list(array.shape) != sent.shape):
        seen = f"{array.size} values" if array.ndim == 1 else f"nested data of {array.shape}"
        raise refused(sent.name, f"has {seen}; its shape {sent.shape} takes another number")
    refuse_infinite(sent.name, array)
    return array.reshape(sent.shape)


def _array_of_json(text: msgspec.Raw, dtype: np.dtype[np.generic], num_axes: int) -> Array:
    is_nested = bytes(text).lstrip()[1:].lstrip()[:1] == b"["
    values = decoder(dtype.kind, num_axes if is_nested else 1).decode(text)
    with np.errstate(over="raise"):
        return np.array(values, dtype)


@cache
def decoder(kind: str, depth: int) -> msgspec.json.Decoder[Any]:
    """Reads lists of lists, `depth` deep, of a numpy kind."""
    item: Any = _ITEM[kind]
    for _ in range(depth):
        item = list[item]
    return msgspec.json.Decoder(item)


def _array_of_raw(raw: memoryview, dtype: np.dtype[np.generic]) -> Array:
    array = np.frombuffer(raw, dtype).copy()
    if dtype.kind == "b" and (seen := array.view(np.uint8).max(initial=0)) > 1:
        raise ValueError(f"a byte of BOOL is 0 or 1, seen {seen}")
    return array


def refuse_infinite(name: str, array: Array) -> None:
    """NaN stands for a missing value; infinity stands for nothing.

    Raises:
        BadRequestError: a number is infinite.
    """
    if array.dtype.kind == "f" and np.isinf(array).any():
        at = int(np.flatnonzero(np.isinf(array))[0])
        raise refused(name, f"has value {at} infinite; a missing number is null, or NaN in binary")


def exact(name: str, array: Array, wanted: np.dtype[np.generic]) -> Array:
    """The same numbers in another type.

    Raises:
        BadRequestError: a number has no equal in that type, or one of the two is BOOL.
    """
    if array.dtype == wanted:
        return array
    sent, taken = DATATYPE_OF[array.dtype], DATATYPE_OF[wanted]
    if "b" in (array.dtype.kind, wanted.kind):
        raise refused(name, f"is sent as {sent}; expected {taken}")
    with np.errstate(all="ignore"):
        converted = array.astype(wanted)
        lost = converted.astype(array.dtype) != array
        # What a cast makes of a number beyond the range depends on the processor.
        lost |= (converted < 0) != (array < 0)
        if wanted.kind in "iu" and array.dtype.kind == "f":
            lost |= array >= 2.0 ** (8 * wanted.itemsize - (wanted.kind == "i"))
        elif wanted.kind == "f" and array.dtype.kind in "iu":
            lost |= converted >= 2.0**63
    if array.dtype.kind == "f" and wanted.kind == "f":
        lost &= ~np.isnan(array)
    if lost.any():
        at = int(np.flatnonzero(lost)[0])
        value = array.ravel()[at]
        raise refused(name, f"has value {at} {value} in {sent}, which {taken} cannot hold exactly")
    return converted


def read_columns(inputs: Iterable[Sent]) -> dict[str, list[Any]]:
    """Columns of a request that names entities: keys, and inputs that no feature view holds.

    Values are texts or numbers, None where missing. Which columns there have to be is the entity
    reader's to judge.

    Raises:
        BadRequestError: one is there twice, is no column, or differs in length from another.
    """
    found: dict[str, list[Any]] = {}
    for sent in inputs:
        if sent.name in found:
            raise refused(sent.name, "is in the request twice")
        found[sent.name] = _column(sent)
    lengths = {name[:100]: len(values) for name, values in found.items()}
    if len(set(lengths.values())) != 1:
        raise BadRequestError(f"the columns have {lengths} values; expected one a row of each")
    return found


def _column(sent: Sent) -> list[Any]:
    if not sent.shape or sent.shape[0] < 1 or sent.shape[1:] not in ([], [1]):
        raise refused(sent.name, f"has shape {sent.shape[:8]}; a column has [rows] or [rows, 1]")
    if sent.datatype == BYTES:
        values = _texts(sent)
    elif sent.text is not None and sent.datatype in NUMPY_OF:
        kind: Any = _ITEM[NUMPY_OF[sent.datatype].kind]
        values = _decoded(sent, sent.text, list[kind | None])
    else:
        values = [None if v != v else v for v in array_of(sent).ravel().tolist()]
    if len(values) != sent.shape[0]:
        raise refused(sent.name, f"has {len(values)} values; its shape is {sent.shape}")
    return values


def _decoded(sent: Sent, text: msgspec.Raw, kind: Any) -> list[Any]:
    try:
        values: list[Any] = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise refused(sent.name, f"has data that {sent.datatype} does not take: {exc}") from exc
    return values


def _texts(sent: Sent) -> list[Any]:
    if sent.text is not None:
        values = _decoded(sent, sent.text, list[str | None])
    else:
        parts = _split(sent.name, sent.raw) if sent.raw is not None else sent.items or ()
        try:
            values = [part.decode() for part in parts]
        except UnicodeDecodeError as exc:
            raise refused(sent.name, f"has a value that is no UTF-8: {exc}") from exc
    if any(value is not None and len(value) > MOST_TEXT for value in values):
        raise refused(sent.name, f"has a text of more than {MOST_TEXT} characters")
    return values


def _split(name: str, data: memoryview) -> list[bytes]:
    """Texts in binary data: each is its length in four bytes, then itself."""
    values: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 4
        if end <= len(data):
            end += struct.unpack_from("<I", data, at)[0]
        if end > len(data):
            raise refused(name, "has binary data that ends inside a text or its length")
        values.append(bytes(data[at + 4 : end]))
        at = end
    return values
