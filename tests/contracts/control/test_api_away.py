"""The Prefect API is away while a step works: the step's work is not lost, and nothing fails."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import httpx
import pytest
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)

import infra.platform.api as api_module
from infra.orchestration.client import client_settings
from tasks.kernel.errors import TransientError
from tasks.kernel.retry_policy import is_api_away, only_transient
from tests.support.host.processes import wait_until
from tests.support.services.gates import Gate, gate
from tests.support.services.prefect_platform import PrefectApi

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def way(prefect_api: PrefectApi) -> Iterator[Gate]:
    """The way to the server; shut, it is away for longer than Prefect's client asks again."""
    port = urlsplit(prefect_api.url).port
    assert port
    with prefect_api.in_process(), gate(port) as made:
        through = {
            PREFECT_API_URL: f"http://127.0.0.1:{made.port}/api",
            PREFECT_CLIENT_MAX_RETRIES: 0,
            PREFECT_LOGGING_TO_API_ENABLED: False,
        }
        with temporary_settings(through):
            yield made


@pytest.mark.slow
def test_a_server_that_cannot_write_does_not_count_as_well(prefect_api: PrefectApi) -> None:
    api = api_module.PrefectApi(prefect_api.url, prefect_api.auth_string, timeout_s=2)
    assert api.can_write()
    with closing(sqlite3.connect(prefect_api.home / "prefect.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not api.can_write()
        assert api.version(), "it answers whoever only reads"
        other.execute("ROLLBACK")
    wait_until(api.can_write, "it can write again")
    assert not replace(api, password="admin:another").can_write()


@pytest.mark.slow
def test_a_step_is_tried_again_when_the_api_was_away_at_its_end(way: Gate, tmp_path: Path) -> None:
    tries = tmp_path / "tries"

    @task(retries=1, retry_condition_fn=only_transient)
    def step() -> int:
        with tries.open("a") as stream:
            stream.write("x")
        is_first = tries.read_text() == "x"
        if is_first:
            way.shut()
        try:
            create_markdown_artifact("made", key="made")
        finally:
            if is_first:
                way.open()
        return 42

    @flow(name="writes-an-artifact")
    def writing() -> int:
        return step()

    assert writing() == 42
    assert tries.read_text() == "xx"


class Unwell(BaseHTTPRequestHandler):
    """Answers 500 at first, as Prefect's server does while its database is away."""

    num_asked = 0

    def do_GET(self) -> None:
        Unwell.num_asked += 1
        self.send_response(500 if Unwell.num_asked < 3 else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'"hello"')

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on standard error."""


@pytest.mark.slow
def test_clients_of_the_platform_ask_again_while_the_servers_database_is_away(
    tmp_path: Path,
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Unwell) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        settings = client_settings(tmp_path, url, None)
        program = "from prefect import get_client as c; print(c(sync_client=True).hello().json())"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        told = subprocess.run(
            [sys.executable, "-c", program],
            env={**inherited, **settings},
            capture_output=True,
            text=True,
            timeout=300,
        )
        server.shutdown()
    assert told.stdout.strip() == "hello", told.stderr
    assert Unwell.num_asked == 3


def status(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://127.0.0.1/api")
    return httpx.HTTPStatusError("told", request=request, response=httpx.Response(code))


@pytest.mark.parametrize(
    ("failure", "away"),
    [
        (httpx.ConnectError("refused"), True),
        (httpx.ReadTimeout("late"), True),
        (status(503), True),
        (status(500), True),
        (status(404), False),
        (status(401), False),
        (TransientError("else"), False),
        (ValueError("wrong"), False),
    ],
)
def test_only_a_server_that_does_not_serve_counts_as_away(failure: Exception, away: bool) -> None:
    assert is_api_away(failure) is away
