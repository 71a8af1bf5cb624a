"""Messages of gRPC calls get a time to arrive, as requests over HTTP do.

grpc.aio reads a call's message before it calls what answers it, and waits as long as the client
likes: as many calls without a message as `grpc.max_concurrent_calls` would shut out all others. So
a method that takes one message is offered as one that takes several, and the first is read here; on
the wire the two are the same. Nobody is waited for before it is known who asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from serving.errors import BadRequestError, RequestTimeoutError
from serving.protocol.grpc.refusals import abort

Details = Any
Handler = Any
STRANGERS_S = 1.0
"""Seconds for messages of calls that anybody may make. They ask of health, by a name at most."""


class Arriving(grpc.aio.ServerInterceptor):
    """Ends calls whose message is not there in time, or is none."""

    def __init__(
        self,
        limit_s: float,
        recognise: Callable[[Any, str], Awaitable[None]],
        open_methods: frozenset[str],
    ) -> None:
        self._limit_s = limit_s
        self._recognise = recognise
        self._open_methods = open_methods
        self._known: dict[Handler, Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """The method's handler, which is called before its message is read."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        known = self._known.get(handler)
        if known is None:
            known = self._known[handler] = self._bounded(handler, details.method)
        return known

    def _bounded(self, handler: Handler, method: str) -> Handler:
        async def message(context: Any) -> Any:
            if method in self._open_methods:
                return await _message(context, min(self._limit_s, STRANGERS_S))
            await self._recognise(context, method)
            return await _message(context, self._limit_s)

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
