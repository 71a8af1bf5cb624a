"""The real loop through its deployments gives what it gives in one process."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from flows.config import read_pipeline_config
from tasks.contracts.run import RunRecord
from tests.support.platform.deployed import deploy, is_final, wait_for_run
from tests.support.platform.loops import Loop, loop_repository
from tests.support.services.prefect_platform import PrefectApi
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

STAGES = ("feature_refresh", "training", "conversion", "promotion", "drift_check")
LIMIT_S = 1800


def outcome(record: RunRecord) -> dict[str, object]:
    """What two runs of the same use case must agree on, to the last digit."""
    return {
        "tables": record.refresh.tables.version,
        "snapshot": record.dataset.snapshot.data.sha256,
        "epochs": [(e.train_loss, e.validation_auc) for e in record.model.epochs],
        "predictions": record.evaluation.predictions.sha256,
        "overall": record.evaluation.overall,
        "gates": [(gate.name, gate.passed) for gate in record.promotion.gates],
        "drift": record.drift,
    }


@proves(Promise.TRACED, "equal digests in one process and on pools")
def test_the_loop_on_work_pools_ends_with_the_same_digests_as_in_one_process(
    prefect_api: PrefectApi,
    tmp_path: Path,
) -> None:
    repository = loop_repository(tmp_path)
    here = Loop(tmp_path / "here", repository)
    code, said = here.run("run")
    assert code == 0, said

    pooled = Loop(tmp_path / "pooled", repository)
    where = {"FALAJ_HOME": str(pooled.home), "FALAJ_FEATURE_REPO": str(repository.path)}
    config = read_pipeline_config(repository.path).model_dump(mode="json")
    with ExitStack() as stack:
        stack.enter_context(prefect_api.in_process())
        client = stack.enter_context(get_client(sync_client=True))
        for name, on, pool in [
            ("pipeline", "pipeline", "real-coordinator"),
            *((stage, "cpu", "real-cpu") for stage in STAGES),
        ]:
            flow = getattr(importlib.import_module(f"flows.{name}"), f"{name}_flow")
            deploy(client, flow, f"flows.{name}.{name}_flow", on, pool)
        stack.enter_context(prefect_api.worker("real-coordinator", **where))
        stack.enter_context(prefect_api.worker("real-cpu", **where))
        deployment = client.read_deployment_by_name("pipeline/pipeline")
        run = client.create_flow_run_from_deployment(deployment.id, parameters={"config": config})
        done = wait_for_run(client, run.id, is_final, "the loop has ended", LIMIT_S)
    assert done.state is not None
    assert done.state.is_completed(), done.state.message

    assert outcome(pooled.record) == outcome(here.record)
    routes = [stage.route for stage in pooled.record.stages]
    assert [route.taken for route in routes if route] == [
        f"{stage.replace('_', '-')}/cpu" for stage in STAGES
    ]
    assert not any(stage.reused for stage in pooled.record.stages)
