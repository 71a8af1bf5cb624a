"""The Prefect API is away while a step works: the step's work is not lost, and nothing fails."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
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
from tasks.kernel.errors import TransientError
from tasks.kernel.retry_policy import is_api_away, only_transient
from tests.support.host.processes import wait_until
from tests.support.services.gates import Gate, gate
from tests.support.services.prefect_platform import PrefectApi

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def way(prefect_api: PrefectApi) -> Iterator[Gate]:
    """The way to the server; shut, it is away for longer than Prefect's client asks again."""
    with prefect_api.in_process(), gate(urlsplit(prefect_api.url).port) as made:
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
