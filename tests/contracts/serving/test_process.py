import base64
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.contracts.serving import address_file
from tests.support.host.processes import run_python, wait_until
from tests.support.serving import serving_clients as clients

LIMITS = """
http: {max_body_bytes: 100000, request_timeout_s: 1.5, keep_alive_s: 2, max_connections: 40}
stop_s: 5
"""
ONE_ANSWER = (
    b'{"model_name":"sums","model_version":"1","outputs":[{"name":"score","datatype":"FP32",'
    b'"shape":[1],"data":[9.5]}]}'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clients.Process]:
    with clients.serving(tmp_path_factory.mktemp("serving"), yaml=LIMITS) as process:
        yield process


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_curl_gets_an_answer_and_what_served_it(
    server: clients.Process, tmp_path: Path, version: str
) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps(clients.request(2, request_id="mine")))
    told = subprocess.run(
        ["curl", version, "-sS", "-i", "-d", f"@{body}", "-H", "X-Request-Id: abc-1",
         f"{server.addresses['http']}{clients.INFER}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    head, _, answer = told.stdout.replace("\r", "").partition("\n\n")
    assert "HTTP/1.1 200" in head
    for line in (
        "x-falaj-model: sums",
        "x-falaj-version: 1",
        "x-falaj-slot: stable",
        "x-request-id: abc-1",
        "x-content-type-options: nosniff",
    ):
        assert line in head
    assert json.loads(answer) == {
        "model_name": "sums",
        "model_version": "1",
        "id": "mine",
        "outputs": [{"name": "score", "datatype": "FP32", "shape": [2], "data": [9.5, 9.5]}],
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2", 200),
        ("GET", "/v2/health/live", 200),
        ("GET", "/v2/health/ready", 200),
        ("GET", "/v2/models/sums", 200),
        ("GET", "/v2/models/sums/versions/1", 200),
        ("GET", "/v2/models/sums/ready", 200),
        ("GET", "/v2/models/sums/versions/1/ready", 200),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/sums/versions/9", 404),
        ("GET", "/v2/models/sums/versions/9/ready", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("POST", "/v2/models/sums/versions/9/infer", 404),
        ("POST", f"/v2/models/sums/versions/{'9' * 150}/infer", 404),
        ("GET", clients.INFER, 405),
        ("DELETE", "/v2", 405),
        ("GET", "/nothing", 404),
        ("POST", "/v2/repository/index", 200),
        ("GET", "/openapi.json", 200),
    ],
)
def test_every_path_answers_with_its_status(
    server: clients.Process, method: str, path: str, status: int
) -> None:
    body = json.dumps(clients.request()).encode() if path.endswith("infer") else None
    assert server.ask(method, path, body if method == "POST" else None)[0] == status


def test_a_client_that_waits_for_100_is_told_to_go_on(server: clients.Process) -> None:
    body = json.dumps(clients.request()).encode()
    with server.socket() as connection:
        head = clients.raw(body, "Expect: 100-continue")[: -len(body)]
        connection.sendall(head)
        assert clients.read_answers(connection, 1) == [(100, b"")]
        connection.sendall(body)
        assert clients.read_answers(connection, 1)[0][0] == 200


@pytest.mark.parametrize("header", ["Content-Length: 200000", "Transfer-Encoding: chunked"])
def test_a_large_body_is_refused_with_413_which_the_client_can_read(
    server: clients.Process, header: str
) -> None:
    head = f"POST {clients.INFER} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode()
    chunk = b"%x\r\n%s\r\n" % (50_000, b"x" * 50_000) if "chunked" in header else b"x" * 50_000
    with server.socket() as connection:
        connection.sendall(head)
        for _ in range(4):
            connection.sendall(chunk)
        assert clients.read_answers(connection, 1)[0][0] == 413


def test_half_a_request_gets_408_and_an_idle_connection_is_closed(server: clients.Process) -> None:
    with server.socket() as half, server.socket() as slow, server.socket() as idle:
        half.sendall(clients.raw(clients.request())[:-10])
        slow.sendall(b"GET /v2 HT")
        assert clients.read_answers(half, 2)[0][0] == 408
        assert clients.read_answers(slow, 2)[0][0] == 408
        assert clients.read_answers(idle, 1) == []
        page = clients.raw(b"x" * 100, path="/v2/repository/index")[:-10]
        with server.socket() as late:
            late.sendall(page)
            assert clients.read_answers(late, 2)[0][0] == 408


def test_more_connections_than_allowed_are_refused_with_503(server: clients.Process) -> None:
    open_sockets = [server.socket() for _ in range(60)]
    try:
        refused = [clients.read_answers(one, 1) for one in open_sockets[-10:]]
        assert all(answers[0][0] == 503 for answers in refused)
    finally:
        for one in open_sockets:
            one.close()
    wait_until(lambda: server.ask("GET", "/v2")[0] == 200, "a free connection")


def test_a_client_that_reads_nothing_is_cut_off(server: clients.Process) -> None:
    with server.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.2)
        with pytest.raises((TimeoutError, ConnectionError)):
            connection.sendall(clients.raw(clients.request(400)) * 3000)
        assert server.ask("POST", clients.INFER, clients.request())[0] == 200
        wait_until(lambda: _cut(connection), "the end of a connection that is not read")


def _cut(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"x")
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def test_requests_by_entities_get_features_and_a_report(server: clients.Process) -> None:
    told = {
        "inputs": [
            {"name": "tailnum", "datatype": "BYTES", "shape": [2], "data": ["N1", "N2"]},
            {"name": "day", "datatype": "INT64", "shape": [2, 1], "data": [1, 2]},
        ]
    }
    status, _, body = server.ask("POST", clients.INFER, told)
    assert status == 200
    answer = json.loads(body)
    assert answer["outputs"][0]["data"] == [8.0, 19.0]
    assert answer["parameters"] == {"features": {"rows": 2}}
    told["inputs"][0]["data"] = ["N1", "N9"]
    assert server.ask("POST", clients.INFER, told)[0] == 422
    told["inputs"][0]["data"] = ["N1"]
    assert server.ask("POST", clients.INFER, told)[0] == 400


def test_the_admin_interface_wants_its_token(server: clients.Process) -> None:
    assert (server.home / "serving/secrets/admin-token").stat().st_mode & 0o777 == 0o600
    status, headers, _ = server.ask("GET", "/admin/models/sums", admin=True)
    assert status == 401
    assert headers["www-authenticate"].startswith("Basic")
    password = base64.b64encode(f"me:{server.token}".encode()).decode()
    by_browser = {"Authorization": f"Basic {password}", "admin": True}
    assert server.ask("GET", "/metrics", **by_browser)[0] == 200  # type: ignore[arg-type]
    assert server.ask("POST", "/admin/models/sums/slots", {}, **by_browser)[0] == 401  # type: ignore[arg-type]
    for wrong in ("Bearer x", f"Basic {server.token}", f"Bearer {server.token}x"):
        assert server.ask("GET", "/metrics", admin=True, Authorization=wrong)[0] == 401
    assert server.ask("GET", "/admin/models/sums", Authorization=f"Bearer {server.token}")[0] == 404


def test_tracks_move_through_the_admin_interface(server: clients.Process) -> None:
    path = "/admin/models/sums"
    assert json.loads(server.ask_admin("GET", path)[2])["slots"]["stable"] == "1"
    moved = server.ask_admin("POST", f"{path}/slots", {"candidate": "2"})
    assert json.loads(moved[2])["slots"] == {"stable": "1", "candidate": "2", "shadow": None}
    _, headers, _ = server.ask("POST", clients.INFER, clients.request(), x_falaj_slot="candidate")
    assert headers["x-falaj-version"] == "2"
    emptied = server.ask_admin("POST", f"{path}/slots", {"candidate": None})
    assert json.loads(emptied[2])["slots"]["candidate"] is None
    for body, status in (({}, 400), ({"other": "1"}, 400), ({"stable": "9"}, 404), (b"x", 400)):
        assert server.ask_admin("POST", f"{path}/slots", body)[0] == status
    assert server.ask_admin("GET", "/metrics")[2].startswith(b"calls ")


def test_a_second_process_on_the_same_state_is_refused(server: clients.Process) -> None:
    env = {**os.environ, "FALAJ_HOME": str(server.home),
           "FALAJ_FEATURE_REPO": str(server.home.parent / "repo")}  # fmt: skip
    told = run_python("-m", clients.SERVING_PROCESS, "--http-port", "0", env=env)
    assert told.returncode == 2
    assert "another process serves from" in told.stderr
    status = run_python("-m", clients.SERVING_PROCESS, "status", env=env, check=True)
    assert json.loads(status.stdout)["http"] == server.addresses["http"]


def test_another_process_serves_from_the_same_state_and_ends_without_refusing_anybody(
    server: clients.Process,
) -> None:
    folder = server.home.parent
    with clients.serving(folder, "--drain-s", "30", yaml=LIMITS, number=1) as second:
        assert second.port != server.port
        assert second.ask_admin("GET", "/admin/models/sums")[0] == 200  # with the same token
        env = {**os.environ, "FALAJ_HOME": str(server.home), "FALAJ_FEATURE_REPO": f"{folder}/repo"}
        status = run_python("-m", clients.SERVING_PROCESS, "status", env=env, check=True)
        assert all(one.addresses["http"] in status.stdout for one in (server, second))
        second.process.send_signal(signal.SIGTERM)
        wait_until(lambda: second.ask("GET", "/v2/health/ready")[0] == 503, "it is not ready")
        code, headers, _ = second.ask("POST", clients.INFER, clients.request())
        assert code == 200
        assert headers["x-envoy-immediate-health-check-fail"] == "true"
        assert "x-envoy-immediate-health-check-fail" not in server.ask("GET", "/v2")[1]
        assert not address_file(server.home, 1).exists()
    assert server.ask("POST", clients.INFER, clients.request())[0] == 200


def test_a_taken_port_is_a_sentence(server: clients.Process, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"cannot listen on .* Nothing was started"):
        with clients.serving(tmp_path, "--http-port", str(server.port)):
            pass


def test_sigterm_answers_what_is_in_flight_and_the_address_file_goes(tmp_path: Path) -> None:
    with clients.serving(tmp_path, FALAJ_TEST_DELAY_S="1.0") as process:
        connections = [process.socket() for _ in range(6)]
        waiting = process.socket()
        waiting.sendall(clients.raw(clients.request())[:40])
        for one in connections:
            one.sendall(clients.raw(clients.request()))
        time.sleep(0.3)  # they are with the engine, which takes a second
        process.process.send_signal(signal.SIGTERM)
        for one in connections:
            assert clients.read_answers(one, 2) == [(200, ONE_ANSWER)]
            one.close()
        waiting.close()
        assert process.process.wait(60) == 0
        assert not (process.home / "serving/server.json").exists()
        with pytest.raises(OSError, match="refused"):
            process.socket()


def test_a_process_without_a_model_starts_and_says_what_is_missing(tmp_path: Path) -> None:
    with clients.serving(tmp_path, FALAJ_TEST_EMPTY="yes") as process:
        assert process.ask("GET", "/v2/health/ready")[0] == 503
        status, _, body = process.ask("GET", "/v2/models/sums/ready")
        assert status == 503
        assert "promote a version" in json.loads(body)["reason"]
        assert process.ask("POST", clients.INFER, clients.request())[0] == 503
        assert process.end() == 0
        assert "not ready" in process.log.read_text()
