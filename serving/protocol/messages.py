"""Requests of the Open Inference Protocol as they lie in JSON, and how they are read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
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


SEQUENCE_REFUSED = (
    "the request has the parameter sequence_id; models here keep no state between requests"
)
NO_DATA = msgspec.Raw(b"")
MOST_AXES = 8
Size = Annotated[int, msgspec.Meta(ge=0)]
Microseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Shape = Annotated[list[int], msgspec.Meta(max_length=MOST_AXES)]


class InputParameters(msgspec.Struct):
    """What may be said of one input."""

    binary_data_size: Size | None = None
    shared_memory_region: Any = None


class InputTensor(msgspec.Struct):
    """One input; `data` is read later, by its datatype."""

    name: str
    datatype: str
    shape: Shape
    data: msgspec.Raw = msgspec.field(default_factory=lambda: NO_DATA)
    parameters: InputParameters | None = None


class OutputParameters(msgspec.Struct):
    """What may be said of one wanted output."""

    binary_data: bool | None = None
    classification: Any = None
    shared_memory_region: Any = None


class WantedOutput(msgspec.Struct):
    """One output that is asked for."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(msgspec.Struct):
    """What may be said of a request. Anything else that stands here is not looked at."""

    timeout: Microseconds | None = None
    binary_data_output: bool = False
    sequence_id: Any = None


class InferRequest(msgspec.Struct):
    """A request for answers."""

    inputs: list[InputTensor]
    outputs: list[WantedOutput] | None = None
    id: str = ""
    parameters: RequestParameters | None = None

    @property
    def timeout_s(self) -> float | None:
        """Time that the client gives, from its parameter in microseconds."""
        if self.parameters is None or self.parameters.timeout is None:
            return None
        return self.parameters.timeout / 1e6


_REQUEST = msgspec.json.Decoder(InferRequest)


def parse_request(body: bytes, json_bytes: bytes | None) -> tuple[InferRequest, memoryview | None]:
    """Take a body apart into its JSON and the binary data behind it.

    Args:
        body: as received.
        json_bytes: value of `Inference-Header-Content-Length`; None where all is JSON.

    Raises:
        BadRequestError: it is no request of the protocol, or asks for what is not offered.
    """
    binary = None
    if json_bytes is not None:
        size = _header_length(json_bytes, len(body))
        body, binary = body[:size], memoryview(body)[size:]
    try:
        request = _REQUEST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequestError(f"the request is not one of the inference protocol: {exc}") from exc
    except RecursionError as exc:
        raise BadRequestError("the request's JSON is nested too deep") from exc
    if request.parameters is not None and request.parameters.sequence_id is not None:
        raise BadRequestError(SEQUENCE_REFUSED)
    return request, binary


def _header_length(text: bytes, num_bytes: int) -> int:
    if not text.isdigit() or len(text) > 18 or int(text) > num_bytes:
        raise BadRequestError(
            f"Inference-Header-Content-Length is {text.decode('latin-1')[:40]!r}; expected the "
            f"number of JSON bytes that the body of {num_bytes} bytes starts with"
        )
    return int(text)
