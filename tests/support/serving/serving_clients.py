"""A serving process of the tests and raw sockets to it."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import parse_headers
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from serving.protocol.http.pages import TOKEN_FILE
from tasks.contracts.serving import address_file
from tests.support.host.processes import python

START_S = 120.0
INFER = "/v2/models/sums/infer"
SERVING_PROCESS = "tests.support.serving.serving_process"


@dataclass
class Process:
    """A serving process that answers."""

    home: Path
    process: subprocess.Popen[str]
    log: Path
    addresses: dict[str, Any] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.addresses["http"].rpartition(":")[2])

    @property
    def token(self) -> str:
        return (self.home / TOKEN_FILE).read_text().strip()

    def ask(
        self, method: str, path: str, body: Any = None, admin: bool = False, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        url = f"{self.addresses['admin' if admin else 'http']}{path}"
        answer = httpx.request(method, url, content=body, headers=told, timeout=60, trust_env=False)
        return answer.status_code, dict(answer.headers), answer.content

    def ask_admin(self, method: str, path: str, body: Any = None) -> tuple[int, Any, bytes]:
        bearer = f"Bearer {self.token}"
        return self.ask(method, path, body, admin=True, Authorization=bearer)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def request(rows: int = 1, number: float = 1.5, request_id: str = "") -> dict[str, Any]:
    """Each row's score is 3 + number + 5."""
    told: dict[str, Any] = {
        "inputs": [
            {"name": "categorical", "datatype": "INT32", "shape": [rows, 2], "data": [1, 2] * rows},
            {
                "name": "numeric",
                "datatype": "FP32",
                "shape": [rows, 3],
                "data": [number, 2, 3] * rows,
            },
        ]
    }
    return {**told, "id": request_id} if request_id else told


def raw(body: dict[str, Any] | bytes, *headers: str, path: str = INFER) -> bytes:
    """A request as it goes over the wire."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


def read_answers(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """So many answers, as status and body; fewer where the server closed."""
    found: list[tuple[int, bytes]] = []
    with connection.makefile("rb") as stream:
        while len(found) < count and (line := stream.readline()):
            length = int(parse_headers(stream).get("content-length", "0"))
            found.append((int(line.split()[1]), stream.read(length)))
    return found


def refused_code(method: Callable[..., Any], *sent: Any, **options: Any) -> grpc.StatusCode:
    """The code with which a call over gRPC is refused; it is never refused without words."""
    with pytest.raises(grpc.RpcError) as caught:
        method(*sent, **options)
    assert caught.value.details()
    return caught.value.code()


@contextmanager
def serving(
    folder: Path, *arguments: str, yaml: str = "", number: int = 0, **environment: str
) -> Iterator[Process]:
    """A process on a state folder of its own, from when it answers; killed at the end."""
    repo, home = folder / "repo", folder / "home"
    repo.mkdir(parents=True, exist_ok=True)
    (repo / "use_case.yaml").write_text("name: sums\nregistry: {model_name: sums}\n")
    (repo / "serving.yaml").write_text(yaml or "{}")
    env = {
        **os.environ,
        "FALAJ_HOME": str(home),
        "FALAJ_FEATURE_REPO": str(repo),
        "PYTHONWARNINGS": "error",
        **environment,
    }
    ports = [word for name in ("http", "grpc", "admin") for word in (f"--{name}-port", "0")]
    log = folder / "log.txt"
    with log.open("wb") as stream:
        words = ("-m", SERVING_PROCESS, *ports, "--replica", str(number), *arguments)
        process = python(*words, env=env, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + START_S
        while not address_file(home, number).exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        told = json.loads(address_file(home, number).read_text())
        yield Process(home, process, log, told)
    finally:
        process.kill()
        process.wait()
