"""The controller's flows on a real Prefect server: what they start, once, and what they record."""

from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled

from flows import decision, pipeline
from flows.config import PipelineConfig, read_pipeline_config
from flows.decision import advise_on_drift, decision_flow, retraining_sweep_flow
from flows.pipeline import pipeline_flow
from flows.recalibration import recalibration_flow
from infra.orchestration.embedded import send_what_is_left
from tasks.contracts.base import TimeWindow
from tasks.control.retraining.decision import Action
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import ClaimState, Outcome
from tasks.control.retraining.task import store_drift_result
from tasks.kernel.errors import DataContractError
from tasks.kernel.process import ProcessName
from tasks.kernel.settings import Settings
from tests.support.control import builders
from tests.support.control.builders import FREE, MODEL
from tests.support.data.builders import metric
from tests.support.platform.deployed import deploy
from tests.support.services.prefect_platform import PrefectApi
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.slow

POOL, DEPLOYMENT = "controlled", "pipeline-controlled"


@pytest.fixture(scope="module")
def config() -> PipelineConfig:
    """A use case that no other test deploys."""
    used = read_pipeline_config(Settings.from_environment({}).feature_repo)
    return used.model_copy(update={"name": "controlled"})


@pytest.fixture(scope="module")
def deployment(prefect_api: PrefectApi, config: PipelineConfig) -> Iterator[UUID]:
    """The loop, deployed to a pool without a worker: what is started there stays scheduled."""
    parameters = {"config": config.model_dump(mode="json")}
    with prefect_api.in_process():
        with get_client(sync_client=True) as client:
            yield deploy(client, pipeline_flow, DEPLOYMENT, POOL, parameters=parameters)
        send_what_is_left()


@pytest.fixture
def ledger(settings: Settings) -> Ledger:
    return Ledger(settings.metadata_url)


def runs_of(ledger: Ledger) -> list[FlowRun]:
    """Runs of the platform that this test's incidents are the keys of."""
    states = (ClaimState.CLAIMED, ClaimState.STARTED, ClaimState.ENDED)
    keys = [claim.order.incident_id for state in states for claim in ledger.claims(state)]
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(
            flow_run_filter=FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=keys))
        )


@pytest.mark.timeout(600)
@proves(Promise.LOST_EVENT, "the sweep answers: one run")
def test_a_result_starts_the_loop_once_and_the_sweep_follows_it_to_its_end(
    deployment: UUID, ledger: Ledger, config: PipelineConfig
) -> None:
    result = ledger.store_result(MODEL, config.name, builders.stale(0), FREE)
    first = decision_flow(result.result_id)
    again = decision_flow(result.result_id)

    (run,) = runs_of(ledger)
    assert [d.outcome for d in first.decisions] == [Outcome.ACTS]
    assert [d.run_id for d in again.decisions] == [str(run.id)]
    assert (run.deployment_id, run.work_queue_name) == (deployment, "retrain")
    assert "falaj:retraining" in run.tags
    rolled = PipelineConfig.model_validate(run.parameters["config"])
    assert rolled.window.end > rolled.splits.train.end
    assert rolled.window != config.window

    assert retraining_sweep_flow() == []
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelled(), force=True)
    retraining_sweep_flow()
    (claim,) = ledger.claims(ClaimState.ENDED)
    assert claim.end.state == "cancelled"

    ledger.store_result(MODEL, config.name, builders.stable(1), FREE)
    ledger.store_result(MODEL, config.name, builders.stale(2), FREE)  # its event is lost
    (answered,) = retraining_sweep_flow()
    assert [d.outcome for d in answered.decisions] == [Outcome.NOTHING_TO_DO, Outcome.ACTS]
    assert len(runs_of(ledger)) == 2


@pytest.mark.timeout(600)
def test_wrong_scores_start_a_recalibration_where_one_is_deployed_and_else_a_retraining(
    deployment: UUID, prefect_api: PrefectApi, ledger: Ledger, config: PipelineConfig
) -> None:
    result = ledger.store_result(MODEL, config.name, builders.shifted(0), FREE)
    (made,) = decision_flow(result.result_id).decisions
    assert (made.action, made.carried_out_as) == (Action.RECALIBRATE, Action.RETRAIN)
    assert "no deployment of the flow recalibration has this use case" in made.reason
    (run,) = runs_of(ledger)
    assert run.deployment_id == deployment

    parameters = {"window": None, "config": config.model_dump(mode="json")}
    with get_client(sync_client=True) as client:
        deployed = deploy(client, recalibration_flow, "cpu-controlled", POOL, parameters=parameters)
    seen = builders.shifted(1, version=5)
    result = ledger.store_result("other", config.name, seen, FREE)
    (made,) = decision_flow(result.result_id).decisions
    assert (made.action, made.carried_out_as) == (Action.RECALIBRATE, Action.RECALIBRATE)
    (run,) = (found for found in runs_of(ledger) if found.deployment_id == deployed)
    assert (run.work_queue_name, made.run_id) == ("retrain", None)
    assert TimeWindow.model_validate(run.parameters["window"]) == seen.window
    assert PipelineConfig.model_validate(run.parameters["config"]) == config
    with get_client(sync_client=True) as client:
        client.delete_deployment(deployed)


@pytest.mark.timeout(300)
def test_a_drift_check_stores_its_result_and_the_loop_ends_with_advice(
    prefect_api: PrefectApi, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = builders.report(auc=metric(-0.1))

    @flow
    def check_and_advise() -> list[Outcome] | None:
        for _ in range(2):
            store_drift_result(
                report, builders.reference(1), None, None, "journeys", FREE, timedelta()
            )
        advice = advise_on_drift(MODEL, "journeys")
        return [made.outcome for made in advice.decisions] if advice else None

    with prefect_api.in_process():
        with monkeypatch.context() as patch:  # the controller is deployed: the answer is its own
            patch.setattr(decision, "deployments_of", lambda name: [name])
            assert check_and_advise() is None
        monkeypatch.setattr(decision, "deployments_of", lambda name: [])
        assert check_and_advise() == [Outcome.DECIDE_ONLY]
        with pytest.raises(DataContractError, match="no drift result"):
            decision_flow("0" * 32)
    (made,) = ledger.decisions()
    assert made.actor.startswith("flow check-and-advise, run ")
    assert ledger.claims(ClaimState.CLAIMED) == []


@pytest.mark.timeout(300)
def test_without_deployments_the_loop_runs_here_and_a_lost_one_is_taken_up(
    prefect_api: PrefectApi, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []

    @flow(name="no-deployment-has-this-name")
    def loop(config: PipelineConfig) -> None:
        windows.append(config.window)
        if len(windows) == 1:
            raise KilledError

    class KilledError(BaseException):
        """The process is gone: nothing that follows in it is done."""

    monkeypatch.setattr(decision, "PIPELINE", loop.name)
    monkeypatch.setitem(decision.ENTRY_POINTS, loop.name, "flows.pipeline.pipeline_flow")
    monkeypatch.setattr(pipeline, "pipeline_flow", loop)
    use_case = read_pipeline_config(Settings.from_environment().feature_repo).name
    result = ledger.store_result(MODEL, use_case, builders.stale(0), FREE)
    with prefect_api.in_process():
        with pytest.raises(KilledError):
            decision_flow(result.result_id)
        (claim,) = ledger.claims(ClaimState.STARTED)
        assert claim.started.kind == "in_process"
        retraining_sweep_flow()  # the process that runs it lives
        assert len(ledger.claims(ClaimState.STARTED)) == 1
        later = ProcessName.of_this().model_copy(update={"boot": "the next boot"})
        monkeypatch.setattr(ProcessName, "of_this", lambda: later)
        retraining_sweep_flow()
    (claim,) = ledger.claims(ClaimState.ENDED)
    assert (claim.end.state, len(windows)) == ("completed", 2)
