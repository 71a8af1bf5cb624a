"""Requests of the Open Inference Protocol as they lie in JSON, and how they are read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from serving.errors import BadRequestError

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
