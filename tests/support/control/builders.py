"""Evidence, drift reports and standings for tests of the controller."""

from datetime import UTC, datetime, timedelta
from typing import Any

from tasks.contracts.base import ModelVersionRef, TimeWindow
from tasks.contracts.drift import DriftReport, DriftResult
from tasks.contracts.evaluation import Metric, PairedComparison
from tasks.contracts.release import ChampionState
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.decision import Evidence
from tests.support.data.builders import feature_drift, metric, metric_set, version_ref

MODEL, USE_CASE = "delays", "journeys"
FREE = RetrainingPolicy(cool_down_hours=0, max_runs_per_week=1000)
FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)


def week(number: int) -> TimeWindow:
    start = FIRST_DAY + timedelta(days=7 * number)
    return TimeWindow(start=start, end=start + timedelta(days=7))


def comparison(brier: Metric) -> PairedComparison:
    return PairedComparison(
        against="present champion", auc_difference=metric(0.0), brier_difference=brier
    )


def evidence(
    result: DriftResult = DriftResult.RETRAIN,
    number: int = 0,
    *,
    auc: Metric | None = None,
    version: int = 1,
    **changes: Any,
) -> Evidence:
    """One check of week `number`; with `auc`, labels are known."""
    fields: dict[str, Any] = {
        "result": result,
        "window": week(number),
        "version": version,
        "num_features": 10,
        "num_drifted": 3,
        "drifted": ("a", "b", "c"),
        "prediction_drifted": True,
        "prediction_effect_low": 0.2,
        "num_labelled": 1000 if auc else 0,
        "auc_change": auc,
        "excess_brier_change": metric(0.03) if auc else None,
        "champion_age_days": 100.0,
        "former_version": None,
        "former_difference": None,
        "sentences": (f"What was seen in week {number}.",),
    }
    return Evidence(**{**fields, **changes})


def stale(number: int, version: int = 1) -> Evidence:
    """Labels show a stale model."""
    return evidence(number=number, version=version, auc=metric(-0.1))


def shifted(number: int, version: int = 1) -> Evidence:
    """Labels show wrong scores and an intact ranking."""
    return evidence(number=number, version=version, auc=metric(0.0))


def stable(number: int) -> Evidence:
    """Nothing moved."""
    return evidence(DriftResult.STABLE, number, auc=metric(0.0))


def faulty(number: int) -> Evidence:
    """The feed is broken."""
    return evidence(DriftResult.DATA_FAULT, number)


def hurt(number: int) -> Evidence:
    """Version 2, the champion of two days ago, errs more than the one before it."""
    former = {"former_version": 1, "former_difference": comparison(metric(-0.03))}
    return evidence(number=number, version=2, auc=metric(-0.1), champion_age_days=2.0, **former)


def reference(version: int) -> ModelVersionRef:
    return version_ref(f"{version:064x}", name=MODEL, version=version)


def standing(version: int) -> ChampionState:
    return ChampionState(
        version=reference(version),
        promoted_at=FIRST_DAY,
        previous=reference(version - 1) if version > 1 else None,
        previous_trouble=None,
    )


def report(*, auc: Metric | None = None) -> DriftReport:
    """What a drift check of one feature returns."""
    feature = feature_drift("distance", 0.3, 0.25, True)
    return DriftReport(
        reference=week(-10),
        current=week(0),
        num_reference_rows=1000,
        num_current_rows=1000,
        features=(feature,),
        prediction=feature.model_copy(update={"feature": "prediction"}),
        reference_performance=metric_set(num_rows=1000) if auc else None,
        current_performance=metric_set(num_rows=1000) if auc else None,
        auc_change=auc,
        excess_brier_change=metric(0.03) if auc else None,
        result=DriftResult.RETRAIN,
        evidence=("Something moved.",),
    )
