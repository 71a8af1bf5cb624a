import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from open_inference.grpc import protocol
from open_inference.grpc.service import GRPCInferenceServiceStub

from serving.config import checked_config
from serving.protocol.front import Front
from serving.protocol.grpc.service import SERVICE, grpc_server
from serving.security.guard import OpenGuard
from tests.support.serving.guards import StrictGuard
from tests.support.serving.inline_engine import InlineEngine
from tests.support.serving.serving_clients import Process, refused_code, serving

Stub = Any


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    yaml = "{http: {max_body_bytes: 100000}, timeout_s: 20}"
    with serving(tmp_path_factory.mktemp("serving"), yaml=yaml) as process:
        yield process


@pytest.fixture(scope="module")
def channel(server: Process) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.addresses["grpc"]) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Stub:
    return GRPCInferenceServiceStub(channel)


def typed(rows: int = 1, codes: int = 1) -> Any:
    request = protocol.ModelInferRequest(model_name="sums", id="mine")
    categorical = request.inputs.add(name="categorical", datatype="INT32", shape=[rows, 2])
    categorical.contents.int_contents.extend([codes, 2] * rows)
    numbers = request.inputs.add(name="numeric", datatype="FP32", shape=[rows, 3])
    numbers.contents.fp32_contents.extend([1.5, float("nan"), 3] * rows)
    return request


def raw() -> Any:
    request = protocol.ModelInferRequest(model_name="sums")
    request.inputs.add(name="categorical", datatype="INT32", shape=[1, 2])
    request.inputs.add(name="numeric", datatype="FP64", shape=[1, 3])
    request.raw_input_contents.append(np.array([1, 2], "<i4").tobytes())
    request.raw_input_contents.append(np.array([1.5, np.nan, 3], "<f8").tobytes())
    return request


def test_typed_contents_are_answered_typed_and_raw_ones_raw(stub: Stub) -> None:
    answer, call = stub.ModelInfer.with_call(typed(2), metadata=(("x-request-id", "r-7"),))
    assert answer.id == "mine"
    assert list(answer.outputs[0].contents.fp32_contents) == [7.5, 7.5]
    trailing = dict(call.trailing_metadata())
    assert (trailing["x-request-id"], trailing["x-falaj-version"]) == ("r-7", "1")
    answer = stub.ModelInfer(raw())
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [7.5]


WRONG: dict[str, tuple[Callable[[Any], object], Any]] = {
    "no numeric": (lambda r: r.inputs.pop(), typed()),
    "an unknown datatype": (lambda r: setattr(r.inputs[0], "datatype", "BF16"), typed()),
    "another's field": (lambda r: setattr(r.inputs[0], "datatype", "INT64"), typed()),
    "too many values": (lambda r: r.inputs[0].contents.int_contents.append(3), typed()),
    "a number beyond": (lambda r: setattr(r.inputs[0], "datatype", "INT8"), typed(codes=300)),
    "a negative length": (lambda r: r.inputs[0].shape.append(-(2**60)), typed()),
    "negative lengths": (lambda r: r.inputs[0].shape.__setitem__(slice(None), [-1, -1]), typed(0)),
    "many axes": (lambda r: r.inputs[0].shape.__setitem__(slice(None), [0] * 65), typed(0)),
    "a sequence": (lambda r: setattr(r.parameters["sequence_id"], "int64_param", 1), typed()),
    "too few raw": (lambda r: r.raw_input_contents.pop(), raw()),
    "raw and typed": (lambda r: r.inputs[0].contents.int_contents.append(3), raw()),
    "an unknown output": (lambda r: r.outputs.add(name="x"), typed()),
}
UNKNOWN = [("model_name", "x"), ("model_name", "é" * 5000), ("model_version", "9")]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_model_does_not_take_is_the_clients_fault(stub: Stub, wrong: str) -> None:
    change, request = WRONG[wrong]
    change(request)
    assert refused_code(stub.ModelInfer, request) is StatusCode.INVALID_ARGUMENT


def test_what_is_unknown_or_too_large_has_its_code(stub: Stub) -> None:
    for name, value in UNKNOWN:
        request = typed()
        setattr(request, name, value)
        assert refused_code(stub.ModelInfer, request) is StatusCode.NOT_FOUND
    too_large = refused_code(stub.ModelInfer, typed(5000))
    assert too_large in (StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED)


CHECK = "/grpc.health.v1.Health/Check"
INFER = f"/{SERVICE}/ModelInfer"


@pytest.mark.parametrize("method", [INFER, f"/{SERVICE}/ModelMetadata", CHECK])
@pytest.mark.parametrize("messages", [[b"\xff" * 9], []])
def test_what_is_no_message_is_the_clients_fault(
    channel: grpc.Channel, method: str, messages: list[bytes]
) -> None:
    code = refused_code(channel.stream_unary(method), iter(messages), timeout=60)
    assert code is StatusCode.INVALID_ARGUMENT


def test_health_and_metadata_answer(stub: Stub) -> None:
    assert stub.ServerLive(protocol.ServerLiveRequest()).live
    assert stub.ServerReady(protocol.ServerReadyRequest()).ready
    assert stub.ModelReady(protocol.ModelReadyRequest(name="sums", version="1")).ready
    assert stub.ServerMetadata(protocol.ServerMetadataRequest()).name == "falaj"
    told = stub.ModelMetadata(protocol.ModelMetadataRequest(name="sums"))
    assert [list(tensor.shape) for tensor in told.inputs] == [[-1, 2], [-1, 3]]


def test_generic_tools_learn_its_health_and_its_services(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        asked = health_pb2.HealthCheckRequest(service=service)
        assert health.Check(asked).status == health_pb2.HealthCheckResponse.SERVING
        assert next(health.Watch(asked)).status == health_pb2.HealthCheckResponse.SERVING
    other = health_pb2.HealthCheckRequest(service="other")
    assert refused_code(health.Check, other) is StatusCode.NOT_FOUND
    database = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in database.get_services()
    found = DescriptorPool(database).FindServiceByName(SERVICE)
    assert "ModelInfer" in found.methods_by_name


@asynccontextmanager
async def listening(guard: Any = None, **told: Any) -> AsyncIterator[tuple[Front, Any, str]]:
    """A server in this process, a channel to it, and its address."""
    config = checked_config(told, "the test")
    front = Front(InlineEngine(lambda inputs: {}), guard or OpenGuard(config), config)
    server, port = grpc_server(front, "127.0.0.1", 0)
    await server.start()
    address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(address) as channel:
        yield front, channel, address
    await server.stop(0)


@pytest.mark.anyio
async def test_calls_without_a_message_do_not_shut_out_the_others() -> None:
    told = {"http": {"request_timeout_s": 1.0}, "grpc": {"max_concurrent_calls": 3}}
    async with listening(**told) as (_, channel, _):
        silent = [channel.stream_unary(method)() for method in (INFER, CHECK)]
        streams = [channel.stream_stream("/grpc.health.v1.Health/Watch")()]
        for call in [*silent, *streams]:
            assert await call.code() is StatusCode.DEADLINE_EXCEEDED
            assert "did not arrive" in await call.details()
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


@pytest.mark.anyio
async def test_strangers_are_refused_before_their_message_is_waited_for() -> None:
    async with listening(StrictGuard()) as (_, channel, _):
        stranger = channel.stream_unary(INFER)()
        assert await stranger.code() is StatusCode.UNAUTHENTICATED
        open_to_all = channel.stream_unary(CHECK)()
        assert await open_to_all.code() is StatusCode.DEADLINE_EXCEEDED
        assert "within 1 s" in await open_to_all.details()
        asked = protocol.ServerMetadataRequest()
        known = GRPCInferenceServiceStub(channel).ServerMetadata(asked, metadata=(("x-who", "me"),))
        assert (await known).name == "falaj"


@pytest.mark.anyio
async def test_no_call_of_many_that_come_while_the_server_is_busy_ends_unseen() -> None:
    async with listening() as (_, _, address):
        with grpc.insecure_channel(address) as channel:
            stub = GRPCInferenceServiceStub(channel)
            asked = protocol.ServerLiveRequest()
            calls = [stub.ServerLive.future(asked, timeout=60) for _ in range(2500)]
            codes = await asyncio.to_thread(lambda: {call.code() for call in calls})
    # More than `grpc.max_concurrent_calls` are refused as such; none is told as given up.
    assert StatusCode.OK in codes
    assert codes <= {StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED}


@pytest.mark.anyio
async def test_what_holds_a_call_open_is_for_those_who_may_read() -> None:
    asked = health_pb2.HealthCheckRequest()
    async with listening(StrictGuard()) as (front, channel, _):
        health = health_pb2_grpc.HealthStub(channel)
        told = await health.Check(asked)
        assert told.status == health_pb2.HealthCheckResponse.SERVING
        lists = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        other = (("x-who", "other"),)
        for stream in (
            health.Watch(asked, metadata=other),
            stub.ServerReflectionInfo(iter([lists]), metadata=other),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() is StatusCode.PERMISSION_DENIED
        stranger = channel.stream_stream("/grpc.health.v1.Health/Watch")()
        assert await stranger.code() is StatusCode.UNAUTHENTICATED
        watched = health.Watch(asked, metadata=(("x-who", "me"),))
        seen = []
        async for answer in watched:
            seen.append(answer.status)
            front.stopping = True  # the watcher is told, and the process waits for none
        assert seen == [
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        ]


def test_a_client_that_gives_up_is_told_to_the_engine_in_time(tmp_path: Any) -> None:
    with (
        serving(tmp_path, FALAJ_TEST_DELAY_S="0.7") as process,
        grpc.insecure_channel(process.addresses["grpc"]) as channel,
    ):
        slow = GRPCInferenceServiceStub(channel)
        started = time.monotonic()
        code = refused_code(slow.ModelInfer, typed(), timeout=0.2)
        assert code is StatusCode.DEADLINE_EXCEEDED
        assert slow.ModelInfer(typed()).id == "mine"
        assert time.monotonic() - started >= 0.7
        page = process.ask_admin("GET", "/metrics")[2]
        assert page == b"calls 1\n"  # the one that was given up was not computed
        future = slow.ModelInfer.future(typed())
        time.sleep(0.4)  # it is with the engine
        assert process.end() == 0
        assert future.result().id == "mine"
