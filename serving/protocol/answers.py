"""Answers of the Open Inference Protocol: JSON, or JSON with binary tensors behind it.

JSON has no words for NaN and infinity: both are `null` there. Binary tensors hold them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np

from serving.errors import ServingError
from serving.interfaces import SERVED_HEADERS, Answer, Served
from serving.protocol.plans import Wanted
from serving.protocol.tensors import DATATYPE_OF

_ENCODER = msgspec.json.Encoder()
MOST_MESSAGE = 4000
"""Characters of a refusal. gRPC has it in its trailers, and clients take no long ones there."""

JSON = (b"content-type", b"application/json")
SECURITY_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


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


def encode_answer(
    answer: Answer,
    wanted: Wanted,
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> tuple[bytes, int | None]:
    """The body of an answer, and the bytes of its JSON where a binary tensor follows, else None."""
    array = answer.outputs[wanted.name]
    tensor = OutputTensor(wanted.name, DATATYPE_OF[array.dtype], array.shape)
    binary = None
    if wanted.binary:
        binary = np.ascontiguousarray(array).tobytes()
        tensor.parameters = {"binary_data_size": len(binary)}
    else:
        tensor.data = (array if array.ndim == 1 else array.ravel()).tolist()
    served = answer.served
    body = _ENCODER.encode(
        InferAnswer(served.model, served.version, request_id, parameters, [tensor])
    )
    return (body, None) if binary is None else (body + binary, len(body))


def encode_json(value: Any) -> bytes:
    """Any plain value."""
    return _ENCODER.encode(value)


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
    headers = [JSON, *SECURITY_HEADERS]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
