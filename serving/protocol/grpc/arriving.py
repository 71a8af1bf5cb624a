"""Messages of gRPC calls get a time to arrive, as requests over HTTP do.

grpc.aio reads a call's message before it calls what answers it, and waits as long as the client
likes: as many calls without a message as `grpc.max_concurrent_calls` would shut out all others. So
a method that takes one message is offered as one that takes several, and the first is read here; on
the wire the two are the same. Nobody is waited for before it is known who asks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from serving.errors import BadRequestError, RequestTimeoutError, ServingError
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


Details = Any
Handler = Any
STRANGERS_S = 1.0
"""Seconds for messages of calls that anybody may make. They ask of health, by a name at most."""


@dataclass(eq=False)
class Arriving(grpc.aio.ServerInterceptor):
    """Ends calls whose message is not there in time, or is none."""

    limit_s: float
    recognise: Callable[[Any, str], Awaitable[None]]
    open_methods: frozenset[str]

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """The method's handler, which is called before its message is read."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        return self._bounded(handler, details.method)

    def _bounded(self, handler: Handler, method: str) -> Handler:
        async def message(context: Any) -> Any:
            if method in self.open_methods:
                return await _message(context, min(self.limit_s, STRANGERS_S))
            await self.recognise(context, method)
            return await _message(context, self.limit_s)

        async def one(messages: object, context: Any) -> Any:
            return await handler.unary_unary(await message(context), context)

        async def several(messages: object, context: Any) -> AsyncIterator[Any]:
            async for answer in handler.unary_stream(await message(context), context):
                yield answer

        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(several, *codecs)
        return grpc.stream_unary_rpc_method_handler(one, *codecs)


async def _message(context: Any, limit_s: float) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            message = await context.read()
    except TimeoutError:
        late = f"the message did not arrive whole within {limit_s:g} s"
        await abort(context, RequestTimeoutError(late), "")
    except DecodeError as exc:
        none = f"what was sent is no message of this service: {exc}"
        await abort(context, BadRequestError(none), "")
    if message is grpc.aio.EOF:
        await abort(context, BadRequestError("the call ended without a message"), "")
    return message
