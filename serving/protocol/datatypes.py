"""Datatypes of the Open Inference Protocol, and conversions between them that lose nothing."""

from __future__ import annotations

import numpy as np

from serving.calls import Array
from serving.errors import BadRequestError

BYTES = "BYTES"
NUMPY_OF: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""Datatypes of numbers, as they lie in binary tensors."""
DATATYPE_OF = {dtype: name for name, dtype in NUMPY_OF.items()}
KNOWN = ", ".join(NUMPY_OF)


def datatype_of(array: Array) -> str:
    """The protocol's name of an array's type."""
    return DATATYPE_OF[array.dtype]


def refuse_infinite(name: str, array: Array) -> None:
    """NaN stands for a missing value; infinity stands for nothing.

    Raises:
        BadRequestError: a number is infinite.
    """
    if array.dtype.kind == "f" and np.isinf(array).any():
        at = int(np.flatnonzero(np.isinf(array))[0])
        raise BadRequestError(
            f"input {name!r}: value {at} is infinite; expected a finite number, or null (NaN in "
            "binary data) for a missing one"
        )


def exact(name: str, array: Array, wanted: np.dtype[np.generic]) -> Array:
    """The same numbers in another type.

    Raises:
        BadRequestError: a number has no equal in that type, or one of the two is BOOL.
    """
    if array.dtype == wanted:
        return array
    sent, taken = DATATYPE_OF[array.dtype], DATATYPE_OF[wanted]
    if "b" in (array.dtype.kind, wanted.kind):
        raise BadRequestError(f"input {name!r} is sent as {sent}; expected {taken}")
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
        raise BadRequestError(
            f"input {name!r}: value {at} is {array.ravel()[at]} in {sent}, which {taken} cannot "
            f"hold exactly; send it as {taken}"
        )
    return converted
