"""A real Prefect server with password for tests, and process workers on it.

    def test_x(prefect_api: PrefectApi) -> None:
        with prefect_api.in_process(), prefect_api.worker("cpu"):
            ...

`prefect_api` is one server for the whole test session, on a free port and a database of its own:
give pools, deployments and automations names that no other test uses. Everything started here ends
with its `with` block, and when the test process is killed.
"""

from collections.abc import Iterator
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact

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


def shown(key: str, run: UUID | None = None) -> list[Artifact]:
    """Artifacts that flow runs, or one of them, have shown under a key; the newest last."""
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=wanted)
    found.sort(key=lambda artifact: str(artifact.created))
    return [made for made in found if run is None or str(made.flow_run_id) == str(run)]
