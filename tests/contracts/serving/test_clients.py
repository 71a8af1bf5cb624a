"""Clients that nobody here wrote; each in an environment of its own."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.kernel.settings import PROJECT_ROOT, tool_python
from tests.support.serving.serving_clients import INFER, Process, request, serving

PYTHON = tool_python("serving-clients")
CLIENT = PROJECT_ROOT / "tests" / "support" / "services" / "triton_v2_client.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="no .venv-serving-clients; `make tools` makes it"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving(tmp_path_factory.mktemp("serving")) as process:
        yield process


@pytest.fixture(scope="module")
def told(server: Process) -> dict[str, Any]:
    addresses = (server.addresses["http"], server.addresses["grpc"])
    command = [str(PYTHON), str(CLIENT), *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def test_tritons_http_client_understands_all_of_the_protocol(told: dict[str, Any]) -> None:
    http = told["http"]
    assert http["live"]
    assert http["ready"]
    assert http["metadata"]["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]
    assert http["index"] == [{"name": "sums", "version": "1", "state": "READY", "reason": ""}]
    for form in ("json", "binary"):
        assert http[form] == [[7.5, 22.0], f"id-{form}"]
    assert http["async"] == [[7.5, 22.0]] * 20
    assert http["unloaded"] is False
    assert http["refusal"][0] == "400"
    assert "lacks 'numeric'" in http["refusal"][1]


def test_tritons_grpc_client_understands_all_of_the_protocol(told: dict[str, Any]) -> None:
    grpc = told["grpc"]
    assert grpc["live"]
    assert grpc["ready"]
    shapes = {one["name"]: one["shape"] for one in grpc["metadata"]["inputs"]}
    assert shapes["categorical"] == ["-1", "2"]
    assert grpc["raw"] == [[7.5, 22.0], "id-grpc"]
    assert grpc["entities"] == [[8.0, 19.0], {"rows": 2}]
    assert grpc["absent input"][0] == "StatusCode.INVALID_ARGUMENT"
    assert grpc["unknown model"][0] == "StatusCode.NOT_FOUND"
    assert grpc["empty track"][0] == "StatusCode.UNAVAILABLE"


def test_what_a_fuzzer_makes_of_the_openapi_document_never_gets_a_500(
    server: Process, tmp_path: Path
) -> None:
    options = {
        "--checks": "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance,unsupported_method",
        "--exclude-path-regex": "repository/models|health/ready",  # no unloading
        "--max-examples": "4",
        "--seed": "7",
    }
    words = [word for option in options.items() for word in option]
    address = f"{server.addresses['http']}/openapi.json"
    program = str(PYTHON.parent / "schemathesis")
    command = [program, "run", address, *words, "--no-color", "--continue-on-failure"]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert server.ask("POST", INFER, request())[0] == 200
