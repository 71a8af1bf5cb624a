"""Refusals as gRPC tells them: a code, and a sentence in the trailers."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import grpc

from serving.errors import ServingError
from serving.protocol.answers import MOST_MESSAGE, bounded

_CODES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.UNPROCESSABLE_ENTITY: grpc.StatusCode.FAILED_PRECONDITION,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Of refusals; anything else is INTERNAL."""
_WIDEST = 12
"""Bytes that a character takes in the trailers at most: four of UTF-8, each as `%xx`."""


async def abort(context: Any, error: ServingError, request_id: str) -> None:
    """End a call with what is wrong with it."""
    trailing = [(b"x-request-id", request_id.encode())] if request_id else []
    if error.retry_after_s is not None:
        trailing.append((b"retry-after", f"{error.retry_after_s:g}".encode()))
    code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, _fitting(str(error)), metadata_of(trailing))


def metadata_of(headers: Sequence[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Headers as gRPC takes them."""
    return tuple((name.decode(), value.decode()) for name, value in headers)


def _fitting(message: str) -> str:
    """A sentence of which clients take the trailers, where much of it is written as `%xx`."""
    if len(quote(message, safe=" ", errors="replace")) > MOST_MESSAGE:
        return bounded(message, MOST_MESSAGE // _WIDEST)
    return message
