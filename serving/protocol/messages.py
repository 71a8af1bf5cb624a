"""Requests of the Open Inference Protocol as they lie in JSON, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from serving.errors import BadRequestError
from serving.protocol.tensors import Sent, refused

SEQUENCE_REFUSED = (
    "the request has the parameter sequence_id; models here keep no state between requests"
)
NO_DATA = msgspec.Raw(b"")
Size = Annotated[int, msgspec.Meta(ge=0)]
Microseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Shape = Annotated[list[int], msgspec.Meta(max_length=8)]


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
        if not json_bytes.isdigit() or len(json_bytes) > 18 or int(json_bytes) > len(body):
            raise BadRequestError(
                f"Inference-Header-Content-Length is {json_bytes.decode('latin-1')[:40]!r}; "
                f"expected how many of the body's {len(body)} bytes are JSON"
            )
        body, binary = body[: int(json_bytes)], memoryview(body)[int(json_bytes) :]
    try:
        request = _REQUEST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequestError(f"the request is not one of the inference protocol: {exc}") from exc
    except RecursionError as exc:
        raise BadRequestError("the request's JSON is nested too deep") from exc
    if request.parameters is not None and request.parameters.sequence_id is not None:
        raise BadRequestError(SEQUENCE_REFUSED)
    return request, binary


def sent_inputs(request: InferRequest, binary: memoryview | None) -> Iterator[Sent]:
    """Inputs of a request, with their data.

    Raises:
        BadRequestError: one has no data, or some that is not to be read, or binary data is left.
    """
    at = 0
    for tensor in request.inputs:
        told = tensor.parameters
        size = None if told is None else told.binary_data_size
        if told is not None and told.shared_memory_region is not None:
            raise refused(tensor.name, "lies in shared memory, which this server does not read")
        if (size is None) == (tensor.data is NO_DATA):
            raise refused(tensor.name, "needs either `data` or the parameter binary_data_size")
        if size is None:
            yield Sent(tensor.name, tensor.datatype, tensor.shape, tensor.data)
            continue
        if binary is None:
            raise refused(tensor.name, "is binary, but Inference-Header-Content-Length is absent")
        if at + size > len(binary):
            raise refused(
                tensor.name, f"has {size} bytes of binary data; {len(binary) - at} are left"
            )
        yield Sent(tensor.name, tensor.datatype, tensor.shape, None, binary[at : at + size])
        at += size
    if binary is not None and at != len(binary):
        raise BadRequestError(f"{len(binary) - at} bytes of binary data belong to no input")
