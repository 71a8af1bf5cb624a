"""Recalibrate: the champion's network, a new map of its scores, and the way of every candidate."""

from typing import Any

from prefect import flow

from flows.candidate import judge, register, validated_rows
from flows.config import PipelineConfig
from flows.conversion import conversion_flow
from flows.promotion import promotion_flow
from flows.stages import RECORDED, called, check_places, days_or_newest, run_name
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import RecalibrationResult
from tasks.contracts.training import CandidateModel
from tasks.conversion.task import map_program
from tasks.evaluation import task as evaluate
from tasks.evaluation.config import calibration_splits, split_window
from tasks.registry.task import claim_model_name, find_calibration_source


@flow(name="recalibration", flow_run_name=run_name("recalibrate"), **RECORDED)
def recalibration_flow(window: TimeWindow | None, config: PipelineConfig) -> RecalibrationResult:
    """Map the champion's scores anew on a window's labels; what does not help is not registered.

    A map keeps the order of all scores, so this mends scores that promise too much or too little
    and no ranking. It is fitted to the first part of the window and judged on the later one.

    Args:
        window: days whose labels are known, later than those the champion was trained on; its
            features must have been refreshed. None: the newest complete days, as the use case's
            clock says.
        config: the use case.

    Raises:
        WindowError: the window is too short, or holds rows that the network was trained on.
        RegistryError: there is no champion.
        ConfigurationError: the label is one of several classes.
    """
    check_places(config)
    config.refuse_several_classes("a recalibration")
    claim_model_name(config.name, config.features.training_set.feature_service, config.registry)
    window = days_or_newest(window, config)
    fit_window, holdout = split_window(window, config.recalibration)
    source = find_calibration_source(fit_window, holdout, config.registry)
    splits = calibration_splits(source.splits.train, fit_window, holdout)
    config = config.with_splits(splits)
    dataset = validated_rows(config)
    scored = evaluate.score_model_window(source.program, dataset, fit_window, config.evaluation)
    outcome = evaluate.fit_calibrator(scored, dataset.snapshot.columns, config.recalibration)
    before, why_not = source.program.version, outcome.refusal
    result = RecalibrationResult(source=before, fit=outcome, refusal=why_not)
    if outcome.fit is None:
        return result
    model = map_program(source, outcome, dataset, splits)
    evaluation = judge(model, dataset, config)
    refusal = evaluate.weigh_recalibration(model, evaluation)
    result = result.model_copy(update={"refusal": refusal, "evaluation": evaluation})
    if refusal:
        return result
    return result.model_copy(update=promoted(model, evaluation, dataset, config))


def promoted(
    model: CandidateModel,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    config: PipelineConfig,
) -> dict[str, Any]:
    """The way of every judged candidate: registered, converted, promoted or refused."""
    version = register(model, evaluation, dataset, config)
    variants = called(conversion_flow, version, dataset, config)
    decision = called(promotion_flow, version, evaluation, dataset, variants, config)
    return {"version": version, "variants": variants, "promotion": decision}
