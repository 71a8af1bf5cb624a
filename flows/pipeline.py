"""The whole loop once: refresh, train, convert, promote, check drift, report."""

from datetime import UTC, datetime

from prefect import flow, runtime

from flows.config import PipelineConfig
from flows.conversion import conversion_flow
from flows.decision import advise_on_drift
from flows.drift_check import drift_check_flow
from flows.feature_refresh import difference, feature_refresh_flow, parity_check_flow
from flows.promotion import promotion_flow
from flows.stages import RECORDED, Stages, called, check_places, moment_of_run, roll
from flows.training import training_flow
from tasks.contracts.run import RunRecord
from tasks.kernel.provenance import code_commit, host_facts
from tasks.kernel.settings import Settings
from tasks.registry.task import claim_model_name
from tasks.reporting.task import publish_report
from tasks.training.models.making import check_model
from tasks.validation.task import publish_data_docs


@flow(name="pipeline", flow_run_name="loop-{config.name}-{config.window.slug}", **RECORDED)
def pipeline_flow(config: PipelineConfig) -> RunRecord:
    """Run every stage, here or on work pools as `config.routing` says, and write the run report.

    The run fails where features online are then not those of historical retrieval.

    Args:
        config: The use case.
    """
    return run_loop(config)


def run_loop(config: PipelineConfig) -> RunRecord:
    """The loop, as a part of the flow that calls it; a retry of that flow takes up its stages."""
    check_places(config)
    started = datetime.now(UTC)
    service = config.features.training_set.feature_service
    check_model(config.training, Settings.from_environment().feature_repo)
    claim_model_name(config.name, service, config.registry, reserve=False)
    stages = Stages(config.name, config.routing, Settings.from_environment().store)
    refresh = stages.run("feature refresh", feature_refresh_flow, config.window, config)
    trained = stages.run("training", training_flow, config)
    variants = stages.run("conversion", conversion_flow, trained.version, trained.dataset, config)
    evidence = trained.version, trained.evaluation, trained.dataset, variants
    decision = stages.run("promotion", promotion_flow, *evidence, config)
    drift = stages.run("drift check", drift_check_flow, config.current, config)
    assert drift is not None  # training has registered a version
    advise_on_drift(config.registry.model_name, config.name)
    record = RunRecord(
        use_case=config.name,
        question=config.question,
        run_id=f"{started:%Y%m%dT%H%M%SZ}-{str(runtime.flow_run.id)[:8]}",
        started=started,
        code_commit=code_commit(),
        host=host_facts(),
        refresh=refresh,
        dataset=trained.dataset,
        model=trained.model,
        evaluation=trained.evaluation,
        version=trained.version,
        variants=variants,
        promotion=decision,
        drift=drift,
        stages=tuple(stages.times),
    )
    publish_data_docs()
    publish_report(record)
    check_online(config)
    return record


def check_online(config: PipelineConfig) -> None:
    """Compare what readers get with what was trained on: the last thing that a run proves.

    Raises:
        FeatureStoreError: online and offline differ. The report is written, and what was promoted
            stays.
    """
    parity = called(parity_check_flow, config)
    if parity.result == "different":
        raise difference(parity)


@flow(name="retraining", flow_run_name="retrain-{config.name}", **RECORDED)
def retraining_flow(config: PipelineConfig) -> RunRecord:
    """Run the loop on the newest complete days: the safety net below the retraining by drift.

    Args:
        config: The use case; its `clock` says which days.

    Raises:
        WindowError: too few days for training lie before those for validation and test.
    """
    return run_loop(roll(config, moment_of_run()))
