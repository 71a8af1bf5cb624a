"""Whether a new map helped, and which rows may judge it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.contracts.evaluation import (
    Comparison,
    EvaluationReport,
    Metric,
    PairedComparison,
    RegressionComparison,
)
from tasks.evaluation.recalibration import why_no_gain
from tasks.kernel.settings import ArtifactStore
from tests.support.data.builders import dataset, frame
from tests.support.registry.builders import evaluation, metric, trained_model

BETTER, UNSURE = metric(-0.02, 0.01), metric(-0.005, 0.01)
SAME = Metric(value=1e-7, low=-1e-7, high=1e-6)


def paired(**changes: Metric | None) -> PairedComparison:
    fields: dict[str, Any] = {
        "against": "champion:3",
        "auc_difference": SAME,
        "brier_difference": BETTER,
        "log_loss_difference": BETTER,
        "calibration_error_difference": BETTER,
    }
    return PairedComparison(**{**fields, **changes})


@pytest.fixture
def judged(tmp_path: Path) -> EvaluationReport:
    store = ArtifactStore(tmp_path / "artifacts")
    return evaluation(store, trained_model(store, dataset(store, frame(300))))


def no_gain(judged: EvaluationReport, *comparisons: Comparison) -> str | None:
    return why_no_gain(judged.model_copy(update={"comparisons": comparisons}), 3)


def test_a_map_is_kept_where_every_error_is_surely_lower_and_the_ranking_the_same(
    judged: EvaluationReport,
) -> None:
    assert no_gain(judged, paired()) is None
    numbers = RegressionComparison(
        against="champion:3", r2_difference=metric(0.03), rmse_difference=BETTER
    )
    assert no_gain(judged, numbers) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"log_loss_difference": UNSURE}, "log loss changed by -0.0050 [-0.0150, +0.0050]"),
        ({"brier_difference": UNSURE}, "Brier score changed by"),
        ({"calibration_error_difference": metric(0.1)}, "calibration error changed by +0.1"),
        ({"auc_difference": metric(0.02)}, "AUC changed by +0.02"),
        ({"auc_difference": metric(-0.02)}, "AUC changed by -0.02"),
        ({"log_loss_difference": None}, "log loss is not known"),
        ({"brier_difference": Metric(value=float("nan"), low=0, high=float("nan"))}, "Brier"),
    ],
)
def test_anything_less_is_refused_with_the_number(
    judged: EvaluationReport, changes: dict[str, Metric | None], told: str
) -> None:
    refusal = no_gain(judged, paired(**changes))
    assert told in refusal
    assert "Nothing was registered" in refusal


def test_a_judgement_beside_another_champion_shows_no_gain(judged: EvaluationReport) -> None:
    other = paired().model_copy(update={"against": "champion:4"})
    assert "another version became the champion" in str(no_gain(judged, other))
    assert "another version became the champion" in str(no_gain(judged))
