"""What Prefect's database says of a run is held to what `falaj deploy` signed, before it is run."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.objects import FlowRun

from infra.orchestration.worker import check_run
from infra.platform.services import path_to_python
from tasks.governance.journal import Journal
from tasks.kernel.errors import SignatureError
from tests.support.host.processes import run_python
from tests.support.platform.deploys import on_server, part_of_the_file, plan_of, redeploy
from tests.support.services.prefect_platform import PrefectApi, prefect_api_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME, POOL = "recovery-sweep/recovery-sweep", "coordinator"
ELSEWHERE = "tests.support.platform.platform_pools.taking_time_flow"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signed") / "home"


@pytest.fixture(scope="module")
def api(home: Path) -> Iterator[PrefectApi]:
    """A server with one deployment of ours."""
    with prefect_api_server(home.parent / "prefect") as server, server.in_process():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FALAJ_HOME", str(home))
            redeploy(plan_of(part_of_the_file("recovery"), home.parent))
        yield server


@pytest.fixture(scope="module")
def whole(api: PrefectApi) -> dict[str, Any]:
    """What a worker is told of a run."""

    async def told(client: PrefectClient) -> dict[str, Any]:
        deployment = await client.read_deployment_by_name(NAME)
        flow, pool = await client.read_flow(deployment.flow_id), await client.read_work_pool(POOL)
        run = FlowRun(id=uuid4(), flow_id=flow.id, name="sweep")
        return {"run": run, "deployment": deployment, "flow": flow, "pool": pool}

    return on_server(told)


@pytest.mark.parametrize(
    ("which", "changed", "seen"),
    [
        ("deployment", {"entrypoint": ELSEWHERE}, r"recovery-sweep: .*another entrypoint\."),
        ("deployment", {"path": "/srv"}, "another path"),
        ("deployment", {"pull_steps": [{"prefect.deployments.steps.pull": {}}]}, "pull_steps"),
        ("deployment", {"parameters": {"config": 1}}, "another parameters"),
        ("deployment", {"parameter_openapi_schema": {}}, "parameter_openapi_schema"),
        ("deployment", {"job_variables": {"env": {"PYTHONPATH": "/srv"}}}, "job_variables"),
        ("deployment", {"name": "mine"}, r"recovery-sweep/mine: .*there is none.*falaj deploy"),
        ("pool", {"base_job_template": {}}, "work pool coordinator: .*base_job_template"),
        ("run", {"job_variables": {"command": "true"}}, "brings command of its own"),
        ("deployment", None, "the run sweep is of no deployment"),
    ],
)
def test_each_change_is_refused_by_name(
    home: Path, whole: dict[str, Any], which: str, changed: dict[str, Any] | None, seen: str
) -> None:
    assert check_run(home, **whole)
    other = changed and whole[which].model_copy(update=changed)
    with pytest.raises(SignatureError, match=seen):
        check_run(home, **{**whole, which: other})
    last = [line.content for line in Journal(home / "audit").lines()][-1]
    assert last["action"] == "refuse-signature"


def test_a_worker_runs_what_was_signed_and_nothing_that_was_changed(
    api: PrefectApi, home: Path
) -> None:
    def ended(**own: Any) -> tuple[str, str]:
        async def start(client: PrefectClient) -> UUID:
            found = await client.read_deployment_by_name(NAME)
            return (await client.create_flow_run_from_deployment(found.id, **own)).id

        run = on_server(start)
        words = ("-m", "infra.orchestration.worker", "process", "--pool", POOL, "--run-once")
        path = path_to_python(os.environ)
        told = api.command_environment(FALAJ_HOME=str(home), PATH=path)
        run_python(*words, env=told, check=True)
        state: Any = on_server(lambda client: client.read_flow_run(run)).state
        return state.type.value, state.message

    assert ended()[0] == "COMPLETED"
    kind, message = ended(job_variables={"env": {"PYTHONPATH": "/srv"}})
    assert (kind, "another job_variables" in message) == ("CRASHED", True)

    async def change(client: PrefectClient) -> None:
        found = await client.read_deployment_by_name(NAME)
        await client.update_deployment(found.id, DeploymentUpdate(entrypoint=ELSEWHERE))

    on_server(change)
    kind, message = ended()
    assert kind == "CRASHED"
    assert f"deployment {NAME}: the signature does not fit" in message
