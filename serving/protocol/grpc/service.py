"""The Open Inference Protocol over gRPC, in front of the same engine as HTTP."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
import msgspec
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from open_inference.grpc import protocol
from open_inference.grpc.service import GRPCInferenceServiceServicer

from serving.config import MAX_HEADER_BYTES
from serving.errors import BadRequestError, ServingError
from serving.interfaces import GRPC_MODEL_HEADER, Answer, Call
from serving.protocol import messages
from serving.protocol.answers import known_error, served_headers
from serving.protocol.front import Front, capped, now
from serving.protocol.grpc.arriving import Arriving, abort, metadata_of
from serving.protocol.plans import ModelPlan, Wanted
from serving.protocol.tensors import BYTES, DATATYPE_OF, Sent, refused
from tasks.kernel.errors import ConfigurationError

SERVICE = "inference.GRPCInferenceService"
INFER = f"/{SERVICE}/ModelInfer"
OPEN_METHODS = frozenset(
    {f"/{health.SERVICE_NAME}/Check", f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady"}
)
"""Health, for which nobody is asked who they are."""
WATCH_S = 0.5
"""Between two looks at health for those who watch it."""
_LONGEST_S = 86_400.0
_MOST_PENDING = 10_000
"""Calls that wait for the event loop. Of more than 1,000 gRPC ends some unseen, as CANCELLED, which
tells clients that they did it themselves; let in, they are refused by their number, in words."""


class InferenceService(GRPCInferenceServiceServicer):
    """Methods of the protocol's service."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._engine = front.engine

    def handlers(self) -> dict[str, Any]:
        """Handlers of all methods."""
        kinds = vars(protocol)
        return {
            name: grpc.unary_unary_rpc_method_handler(
                _guarded(getattr(self, name)),
                request_deserializer=kinds[f"{name}Request"].FromString,
                response_serializer=kinds[f"{name}Response"].SerializeToString,
            )
            for name in vars(InferenceService)
            if f"{name}Request" in kinds
        }

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether the process answers."""
        return protocol.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether all models answer."""
        return protocol.ServerReadyResponse(ready=self._front.is_ready())

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether a model, or a version, answers."""
        name, version = request.name, request.version or None
        _admit(self._front, context, name)
        messages.known_states(self._engine, name, version)
        return protocol.ModelReadyResponse(ready=self._front.is_ready(name, version))

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Name, version and extensions of the server."""
        _admit(self._front, context)
        return protocol.ServerMetadataResponse(**messages.server_metadata(messages.EXTENSIONS[:1]))

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Tensors and versions of a model."""
        _admit(self._front, context, request.name)
        metadata = messages.model_metadata(self._engine, request.name, request.version or None)
        return protocol.ModelMetadataResponse(**metadata)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answers of a model."""
        metadata = dict(context.invocation_metadata())
        request_id = self._request_id(metadata)
        call = Call(request.model_name, {}, 0, request_id, request.model_version or None)
        try:
            wanted = await self._read(request, context, call)
            answer = await self._front.computed(call)
        except asyncio.CancelledError:
            call.is_gone = True
            raise
        except ServingError as error:
            await abort(context, error, request_id)
        response = protocol.ModelInferResponse(
            model_name=answer.served.model, model_version=answer.served.version, id=request.id
        )
        fill_answer(response, answer, wanted)
        parameters = self._front.parameters_of(call)
        if parameters is not None:
            features = msgspec.json.encode(parameters["features"]).decode()
            response.parameters["features"].string_param = features
        trailing = [*served_headers(answer.served), (b"x-request-id", request_id.encode())]
        context.set_trailing_metadata(metadata_of(trailing))
        return response

    async def _read(self, request: Any, context: Any, call: Call) -> Wanted:
        """Fill a call with what is asked for; what is not taken is reported to observers."""
        front, headers = self._front, _headers(context)
        try:
            found = dict(headers)
            front.admit(call, headers, found, _address(context.peer()))
            front.begin(call, found)
            if "sequence_id" in request.parameters:
                raise BadRequestError(messages.SEQUENCE_REFUSED)
            call.deadline = now() + self._time_of(request, context)
            plan = front.plan(call)
            wanted = wanted_output(request, plan)
            names = [tensor.name for tensor in request.inputs]
            front.fill(call, plan, names, sent_inputs(request))
            if call.entities is not None:
                await front.resolve(call)
        except ServingError as error:
            front.report_refused(call, error)
            raise
        return wanted

    async def recognise(self, context: Any, method: str) -> None:
        """End the call of a client whom this server does not know."""
        try:
            self._front.guard.recognise(_headers(context), _address(context.peer()))
        except ServingError as error:
            metadata = dict(context.invocation_metadata())
            call = Call(str(metadata.get(GRPC_MODEL_HEADER, "")), {}, 0, self._request_id(metadata))
            if method == INFER:
                self._front.report_refused(call, error)
            await abort(context, error, call.request_id)

    def _request_id(self, metadata: Mapping[str, Any]) -> str:
        sent = metadata.get("x-request-id")
        return self._front.ids.accepted(sent.encode() if isinstance(sent, str) else None)

    def _time_of(self, request: Any, context: Any) -> float:
        left = context.time_remaining()
        most = self._front.config.timeout_s
        if left is not None and left < _LONGEST_S:
            most = min(most, max(left, 0.0))
        if "timeout" not in request.parameters:
            return most
        sent = request.parameters["timeout"]
        asked = sent.int64_param or sent.uint64_param
        return capped(asked / 1e6 if asked > 0 else None, most)


def _admit(front: Front, context: Any, model: str | None = None) -> None:
    """Let a client read of the server, or of a model.

    Raises:
        ServingError: as `Guard.admit`.
    """
    front.guard.admit(_headers(context), _address(context.peer()), "read", model)


async def _admit_stream(front: Front, context: Any) -> None:
    """End the call of a client that may not read."""
    try:
        _admit(front, context)
    except ServingError as error:
        await abort(context, error, "")


class HealthService(health_pb2_grpc.HealthServicer):
    """Health of the process, and of its service, which is that all models answer.

    `Check` asks nobody who they are, as the pages of health do. What holds a call open does: all
    calls together are bounded, and strangers could take their places.
    """

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether it is healthy now."""
        answer = self._answer(request.service)
        if answer.status == answer.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service is here")
        return answer

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The same, and each change, until the process ends."""
        await _admit_stream(self._front, context)
        sent = None
        while True:
            stopping, answer = self._front.stopping, self._answer(request.service)
            if answer != sent:
                yield answer
            if stopping:
                return
            sent = answer
            await asyncio.sleep(WATCH_S)

    def _answer(self, service: str) -> Any:
        states = health_pb2.HealthCheckResponse
        if service not in ("", SERVICE):
            return states(status=states.SERVICE_UNKNOWN)
        is_ready = self._front.is_ready()
        return states(status=states.SERVING if is_ready else states.NOT_SERVING)


class Reflection(reflection.aio.ReflectionServicer):
    """Services and messages, for those who may read what the server says of itself."""

    def __init__(self, front: Front) -> None:
        super().__init__([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME])
        self._front = front

    async def ServerReflectionInfo(  # noqa: N802
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[Any]:
        """Answers to questions of one client."""
        await _admit_stream(self._front, context)
        async for answer in super().ServerReflectionInfo(request_iterator, context):
            yield answer


def grpc_server(
    front: Front, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> tuple[grpc.aio.Server, int]:
    """A server that listens, not yet started, and its port; port 0 takes a free one.

    Args:
        credentials: None for no TLS.

    Raises:
        ConfigurationError: the address cannot be had.
    """
    config = front.config
    most = config.http.max_body_bytes
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.server.max_pending_requests", _MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
        ("grpc.max_connection_idle_ms", round(1e3 * max(300.0, config.http.keep_alive_s))),
    ]
    service = InferenceService(front)
    server = grpc.aio.server(
        interceptors=[Arriving(config.http.request_timeout_s, service.recognise, OPEN_METHODS)],
        options=options,
        maximum_concurrent_rpcs=config.grpc.max_concurrent_calls,
    )
    handlers = grpc.method_handlers_generic_handler(SERVICE, service.handlers())
    server.add_generic_rpc_handlers((handlers,))
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(front), server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(front), server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as exc:
        raise ConfigurationError(
            f"gRPC cannot listen on {address}: the port is taken, or the address is not of this "
            "machine. End what has the port, or name another one (0 takes a free one). Nothing "
            "was started"
        ) from exc
    return server, bound


def _guarded(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """A method whose refusals end the call, and which keeps to itself how else it failed."""

    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, known_error(error), "")

    return guarded


def _headers(context: Any) -> list[tuple[bytes, bytes]]:
    return [
        (name.encode(), value.encode() if isinstance(value, str) else value)
        for name, value in context.invocation_metadata()
    ]


def _address(peer: str) -> str:
    """`ipv4:127.0.0.1:5000` and `ipv6:[::1]:5000` without kind and port."""
    kind, _, rest = peer.partition(":")
    return unquote(rest.rpartition(":")[0]).strip("[]") if kind in ("ipv4", "ipv6") else ""


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
