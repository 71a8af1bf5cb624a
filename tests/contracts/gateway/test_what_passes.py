"""What a real Envoy lets through: TLS 1.3, listed paths, bounded bodies, headers of its own."""

import json
import ssl
import subprocess

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from open_inference.grpc.protocol import ModelInferRequest, ModelInferResponse  # type: ignore[import-not-found]

from infra.gateway.rendering import SECURITY_HEADERS
from tests.support.host.processes import wait_until
from tests.support.services.listeners import tls_connection
from tests.support.serving.edges import BODY_LIMIT, INFER, MODEL, Edge
from tests.support.serving.serving_clients import refused_code

GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"


def shake_hands(port: int, version: ssl.TLSVersion) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    with tls_connection(port, context) as secure:
        return secure.version()


def test_tls_1_3_is_spoken_and_1_2_refused(edge: Edge) -> None:
    assert shake_hands(edge.port, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake_hands(edge.port, ssl.TLSVersion.TLSv1_2)


def test_the_server_talks_to_the_edge_alone(edge: Edge) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake_hands(edge.upstream.http_port, ssl.TLSVersion.TLSv1_2)
    with httpx.Client(verify=False, timeout=20) as stranger, pytest.raises(httpx.TransportError):
        stranger.get(f"https://127.0.0.1:{edge.upstream.http_port}/v2/health/live")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/admin/models/flight-delay",
        "/stats",
        "/config_dump",
        "/quitquitquit",
        "/v2/repository/index",
        f"/v2/repository/models/{MODEL}/load",
        "/v2/models/unknown/infer",
        f"/v2/models/{MODEL}/../../repository/index",
        f"/v2/models/{MODEL}/infer/more",
        "/v2//repository//index",
        "/metrics",
        "/inference.GRPCInferenceService/RepositoryModelLoad",
    ],
)
def test_what_is_not_listed_does_not_exist(edge: Edge, path: str) -> None:
    token = edge.bearer("op", "admin:*", "infer:*")["authorization"]
    options = ("-sk", "--path-as-is", "-o", "/dev/null", "-w", "%{http_code}", "-d", "{}")
    done = subprocess.run(
        ["curl", *options, "-H", f"authorization: {token}", f"https://127.0.0.1:{edge.port}{path}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "404"
    assert not edge.upstream.seen


def test_escaped_slashes_are_refused(edge: Edge, client: httpx.Client) -> None:
    headers = edge.bearer("esc")
    answer = client.get(f"/v2/models/{MODEL}%2f..%2f..%2fadmin", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_envoys_administration_is_a_socket_of_its_owner(edge: Edge) -> None:
    folder = edge.plan.files.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "admin.sock").stat().st_mode & 0o777 == 0o600
    config = json.loads((folder / "bootstrap.json").read_text())
    assert set(config["admin"]["address"]) == {"pipe"}


def test_a_body_past_the_limit_is_refused_whole(edge: Edge, client: httpx.Client) -> None:
    fits = client.post(INFER, content=b"x" * BODY_LIMIT, headers=edge.bearer("big"))
    assert fits.status_code == 200
    edge.upstream.seen.clear()
    answer = client.post(INFER, content=b"x" * (BODY_LIMIT + 1), headers=edge.bearer("big"))
    assert answer.status_code == 413

    def pieces() -> object:
        for _ in range(5):
            yield b"x" * (BODY_LIMIT // 4)

    chunked = client.post(INFER, content=pieces(), headers=edge.bearer("big"))
    assert chunked.status_code == 413
    assert not edge.upstream.seen


def test_clients_cannot_name_track_subject_or_address(edge: Edge, client: httpx.Client) -> None:
    for name in ("x-falaj-slot", "X-Falaj-Slot"):
        smuggled = {name: "candidate", "x-falaj-subject": "root", "x-falaj-address": "::9"}
        answer = client.post(INFER, json={}, headers=edge.bearer("sly") | smuggled)
        headers = answer.json()["headers"]
        assert headers["x-falaj-slot"] == "stable"
        assert headers["x-falaj-subject"] == "sly"
        assert headers["x-falaj-address"] == "127.0.0.1"
    twice = [("authorization", edge.bearer("sly")["authorization"])]
    twice += [("x-falaj-slot", "candidate"), ("x-falaj-slot", "shadow")]
    answer = client.post(INFER, json={}, headers=twice)
    assert answer.json()["headers"]["x-falaj-slot"] == "stable"
    other_spelling = edge.bearer("sly") | {"x_falaj_slot": "candidate"}
    assert client.post(INFER, json={}, headers=other_spelling).status_code == 400
    with_key = {"x-api-key": "falaj_nobody", "x-falaj-subject": "root"}
    assert client.post(INFER, json={}, headers=with_key).status_code == 401
    assert "x-falaj-subject" not in edge.upstream.seen[-1].headers


def test_every_answer_has_security_headers_and_a_request_id(
    edge: Edge, client: httpx.Client
) -> None:
    for answer in (
        client.post(INFER, json={}, headers=edge.bearer("h")),
        client.post(INFER, json={}),
        client.get("/nothing"),
    ):
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name] == value
        assert answer.headers["server"] == "falaj"
        assert len(answer.headers["x-request-id"]) == 36
        assert "x-envoy-upstream-service-time" not in answer.headers


def test_a_trace_goes_on_from_client_to_server(edge: Edge, client: httpx.Client) -> None:
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = edge.bearer("tr") | {"traceparent": f"00-{trace}-{span}-01"}
    answer = client.post(INFER, json={}, headers=headers)
    parts = answer.json()["headers"]["traceparent"].split("-")
    assert parts[1] == trace
    assert parts[2] != span
    wait_until(
        lambda: any(bytes.fromhex(trace) in sent for sent in list(edge.collected)),
        "the edge's span was collected",
    )
    begun = client.post(INFER, json={}, headers=edge.bearer("tr")).json()["headers"]["traceparent"]
    assert begun.split("-")[1] != trace


def test_grpc_passes_with_track_and_token(edge: Edge) -> None:
    credentials = grpc.ssl_channel_credentials(edge.authority.read_bytes())
    token = edge.bearer("g")["authorization"]
    with grpc.secure_channel(f"localhost:{edge.port}", credentials) as channel:
        infer = channel.unary_unary(
            GRPC_INFER, ModelInferRequest.SerializeToString, ModelInferResponse.FromString
        )
        request = ModelInferRequest(model_name=MODEL)
        answer = infer(request, metadata=[("authorization", token)], timeout=20)
        assert (answer.model_name, answer.id) == (MODEL, "stable")
        edge.traffic.set_shares(MODEL, 1, 0)
        named = [("authorization", token), ("falaj-model", MODEL), ("x-falaj-slot", "shadow")]
        assert infer(request, metadata=named, timeout=20).id == "candidate"
        assert refused_code(infer, request, timeout=20) is grpc.StatusCode.UNAUTHENTICATED
        load = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        absent = refused_code(load, b"", metadata=[("authorization", token)], timeout=20)
        assert absent is grpc.StatusCode.UNIMPLEMENTED


def test_whoever_watches_a_grpc_server_learns_its_health_and_no_more(edge: Edge) -> None:
    credentials = grpc.ssl_channel_credentials(edge.authority.read_bytes())
    with grpc.secure_channel(f"localhost:{edge.port}", credentials) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest()
        assert health.Check(asked, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
        token = edge.bearer("w")["authorization"]
        watched = health.Watch(asked, metadata=[("authorization", token)], timeout=20)
        assert refused_code(next, watched) is grpc.StatusCode.UNIMPLEMENTED
