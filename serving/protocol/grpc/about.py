"""What generic tools ask of any gRPC server: is it healthy (`grpc.health.v1`), what does it offer.

`Check` asks nobody who they are, as the pages of health do. The two that hold a call open do: all
calls together are bounded, and strangers could take their places.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from serving.protocol.front import Front

Admit = Callable[[Any], Awaitable[None]]
"""Ends a call whose client may not read."""
CHECK = f"/{health.SERVICE_NAME}/Check"
WATCH_S = 0.5
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """Health of the process, and of its service, which is that all models answer."""

    def __init__(self, front: Front, service: str, admit: Admit) -> None:
        self._front = front
        self._names = ("", service)
        self._admit = admit

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether it is healthy now."""
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service is here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The same, and each change, until the process ends."""
        await self._admit(context)
        told = None
        while not (self._front.stopping and told is not None):
            status = self._status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_S)
        if told == _SERVING:
            yield health_pb2.HealthCheckResponse(status=_NOT_SERVING)

    def _status(self, service: str) -> Any:
        if service not in self._names:
            return _UNKNOWN
        ready = not self._front.stopping and self._front.engine.is_ready()
        return _SERVING if ready else _NOT_SERVING


class Reflection(reflection.aio.ReflectionServicer):
    """Services and messages, for those who may read what the server says of itself."""

    def __init__(self, names: list[str], admit: Admit) -> None:
        super().__init__(names)
        self._admit = admit

    async def ServerReflectionInfo(  # noqa: N802
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[Any]:
        """Answers to questions of one client."""
        await self._admit(context)
        async for answer in super().ServerReflectionInfo(request_iterator, context):
            yield answer


def add_to(server: grpc.aio.Server, front: Front, service: str, admit: Admit) -> None:
    """Let a server answer both."""
    names = [service, health.SERVICE_NAME, reflection.SERVICE_NAME]
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(front, service, admit), server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(names, admit), server)
