"""Messages of gRPC: inputs and outputs of `ModelInfer`, and those of the model repository.

Inputs are raw contents, or contents typed by a field. The messages of the repository are not in the
protocol's package; they are made in a pool of their own, as Triton's clients send them.

What generic tools ask of any gRPC server: is it healthy (`grpc.health.v1`), what does it offer.

`Check` asks nobody who they are, as the pages of health do. The two that hold a call open do: all
calls together are bounded, and strangers could take their places.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from serving.errors import BadRequestError
from serving.interfaces import Answer
from serving.protocol.front import Front
from serving.protocol.plans import ModelPlan, Wanted
from serving.protocol.tensors import BYTES, DATATYPE_OF, Sent, refused

SERVICE = "inference.GRPCInferenceService"
_FIELD = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def sent_inputs(request: Any) -> Iterator[Sent]:
    """Inputs of a `ModelInferRequest`, with their data.

    Raises:
        BadRequestError: some are raw and others typed, or a typed one lies in another's field.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequestError(
            f"the request has {len(request.inputs)} inputs and {len(raw)} raw_input_contents"
        )
    for number, tensor in enumerate(request.inputs):
        sent = Sent(tensor.name, tensor.datatype, list(tensor.shape))
        if not raw:
            yield sent._replace(items=_contents(tensor))
        elif tensor.HasField("contents"):
            raise refused(tensor.name, "has both contents and raw_input_contents; send one")
        else:
            yield sent._replace(raw=memoryview(raw[number]))


def _contents(tensor: Any) -> Any:
    field = _FIELD.get(tensor.datatype)
    if field is None:
        known = ", ".join(_FIELD)
        raise refused(
            tensor.name, f"has datatype {tensor.datatype[:40]!r}; expected one of {known}"
        )
    for odd, _ in tensor.contents.ListFields():
        if odd.name != field:
            raise refused(tensor.name, f"of {tensor.datatype} has {odd.name}; expected {field}")
    return getattr(tensor.contents, field)


def wanted_output(request: Any, plan: ModelPlan) -> Wanted:
    """How the output is sent: as raw contents where the inputs are.

    Raises:
        BadRequestError: the model does not give what is asked for.
    """
    if request.outputs:
        plan.check_outputs(list(dict.fromkeys(output.name for output in request.outputs)))
    return Wanted(plan.output, bool(request.raw_input_contents))


def fill_answer(response: Any, answer: Answer, wanted: Wanted) -> None:
    """Put the output into a `ModelInferResponse`."""
    array = answer.outputs[wanted.name]
    datatype = DATATYPE_OF[array.dtype]
    tensor = response.outputs.add(name=wanted.name, datatype=datatype, shape=array.shape)
    if wanted.binary:
        response.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
    else:
        getattr(tensor.contents, _FIELD[datatype]).extend(array.ravel().tolist())


_STRING, _BOOL, _INT64, _MESSAGE = 9, 8, 3, 11
_ONE, _MANY = 1, 3


@cache
def repository_messages() -> dict[str, Any]:
    """Message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="falaj_repository.proto", package="inference", syntax="proto3"
    )
    values = [("bool_param", _BOOL), ("int64_param", _INT64), ("string_param", _STRING)]
    parameter = _add(file.message_type, "ModelRepositoryParameter", *values)
    parameter.oneof_decl.add(name="parameter_choice")
    for field in parameter.field:
        field.oneof_index = 0
    _add(
        file.message_type, "RepositoryIndexRequest", ("repository_name", _STRING), ("ready", _BOOL)
    )
    index = _add(file.message_type, "RepositoryIndexResponse")
    states = [(name, _STRING) for name in ("name", "version", "state", "reason")]
    _add(index.nested_type, "ModelIndex", *states)
    _add_many(index, "models", 1, "RepositoryIndexResponse.ModelIndex")
    for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        asked = [("repository_name", _STRING), ("model_name", _STRING)]
        request = _add(file.message_type, f"{name}Request", *asked)
        entry = _add(request.nested_type, "ParametersEntry", ("key", _STRING), ("value", _MESSAGE))
        entry.options.map_entry = True
        entry.field[1].type_name = ".inference.ModelRepositoryParameter"
        _add_many(request, "parameters", 3, f"{name}Request.ParametersEntry")
        _add(file.message_type, f"{name}Response")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"inference.{message.name}")
        )
        for message in file.message_type
    }


def _add(to: Any, name: str, *fields: tuple[str, int]) -> Any:
    message = to.add(name=name)
    for number, (field, kind) in enumerate(fields, start=1):
        message.field.add(name=field, number=number, type=kind, label=_ONE)
    return message


def _add_many(message: Any, name: str, number: int, kind: str) -> None:
    message.field.add(
        name=name, number=number, type=_MESSAGE, label=_MANY, type_name=f".inference.{kind}"
    )


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
