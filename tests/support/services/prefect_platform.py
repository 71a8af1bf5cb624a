"""A real Prefect server with password for tests, and process workers on it.

    def test_x(prefect_api: PrefectApi) -> None:
        with prefect_api.in_process(), prefect_api.worker("cpu"):
            ...

`prefect_api` is one server for the whole test session, on a free port and a database of its own:
give pools, deployments and automations names that no other test uses. Everything started here ends
with its `with` block, and when the test process is killed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.bench.operation.prefect_api import PrefectApi, prefect_api_server


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectApi]:
    """One real Prefect server for all tests of the session."""
    with prefect_api_server(tmp_path_factory.mktemp("prefect-api")) as api:
        yield api


@pytest.fixture(scope="module")
def on_prefect(prefect_api: PrefectApi) -> Iterator[None]:
    """Flows of a module run on the session's server."""
    with prefect_api.in_process():
        yield
