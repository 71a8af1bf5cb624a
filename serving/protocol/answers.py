"""Answers of the Open Inference Protocol: JSON, or JSON with binary tensors behind it.

JSON has no words for NaN and infinity: both are `null` there. Binary tensors hold them exactly.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import numpy as np

from serving.errors import ServingError
from serving.interfaces import SECURITY_HEADERS, SERVED_HEADERS, Answer, Served
from serving.protocol.plans import Wanted
from serving.protocol.tensors import DATATYPE_OF

logger = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()
MOST_MESSAGE = 4000
"""Characters of a refusal. gRPC has it in its trailers, and clients take no long ones there."""

JSON = (b"content-type", b"application/json")
_AS_JSON = b"content-type: application/json\r\n"
_AS_BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
SECURITY = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]


class OutputTensor(msgspec.Struct, omit_defaults=True):
    """One output; `data` is None where it lies in the binary part."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferAnswer(msgspec.Struct, omit_defaults=True):
    """An answer as it lies in JSON."""

    model_name: str
    model_version: str
    id: str = ""
    parameters: Mapping[str, Any] | None = None
    outputs: list[OutputTensor] = []


class Response(NamedTuple):
    """What is sent over HTTP; `head` lacks the length alone, and its end."""

    head: bytes
    body: bytes


def encode_answer(
    answer: Answer,
    wanted: Wanted,
    request_id: str,
    client_id: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> Response:
    """An answer as JSON, or with its output as a binary tensor behind the JSON."""
    array = answer.outputs[wanted.name]
    tensor = OutputTensor(wanted.name, DATATYPE_OF[array.dtype], array.shape)
    binary = b""
    if wanted.binary:
        binary = np.ascontiguousarray(array).tobytes()
        tensor.parameters = {"binary_data_size": len(binary)}
    else:
        tensor.data = (array if array.ndim == 1 else array.ravel()).tolist()
    served = answer.served
    made = InferAnswer(served.model, served.version, client_id, parameters, [tensor])
    body = _ENCODER.encode(made)
    kind = _AS_BINARY % len(body) if wanted.binary else _AS_JSON
    head = b"%s%sx-request-id: %s\r\n" % (_served_head(served), kind, request_id.encode())
    return Response(head, body + binary if binary else body)


def encode_refusal(error: Exception, request_id: str = "") -> Response:
    """What a client is sent instead of an answer."""
    known = known_error(error)
    head = head_of(known.status, refusal_headers(known, request_id))
    return Response(head, encode_error(str(known)))


def known_error(error: Exception) -> ServingError:
    """What a client gets of an error; of a fault of ours, no more than that it was one."""
    if isinstance(error, ServingError):
        return error
    logger.error("a request could not be taken", exc_info=error)
    return ServingError("this server has failed on the request")


def head_of(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Status line and headers as they are sent."""
    first = f"HTTP/1.1 {status:d} {HTTPStatus(status).phrase}\r\n".encode()
    return first + b"".join([b"%s: %s\r\n" % pair for pair in headers])


@lru_cache(256)
def _served_head(served: Served) -> bytes:
    return head_of(HTTPStatus.OK, [*SECURITY, *served_headers(served)])


def encode_error(message: str) -> bytes:
    """The body of a refusal."""
    return _ENCODER.encode({"error": bounded(message)})


def bounded(message: str, most: int = MOST_MESSAGE) -> str:
    """The sentence of a refusal, cut where it repeats too much of what a client sent."""
    return message if len(message) <= most else f"{message[:most]} ..."


def served_headers(served: Served) -> list[tuple[bytes, bytes]]:
    """Headers that name what answered."""
    values = [served.model, served.version, served.variant, served.track, served.hardware]
    values += [served.fell_over_from] if served.fell_over_from else []
    return [(n.encode(), _as_header(v)) for n, v in zip(SERVED_HEADERS, values, strict=False)]


def _as_header(text: str) -> bytes:
    """Text as a header's value: what is not printable ASCII becomes a question mark."""
    return "".join(c if " " <= c <= "~" else "?" for c in text).encode("ascii")


def refusal_headers(error: ServingError, request_id: str = "") -> list[tuple[bytes, bytes]]:
    """Headers of a refusal."""
    headers = [JSON, *SECURITY]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
