"""The page of a regression: its own metrics and pictures, and no word of another task's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.contracts.data import NumberSummary
from tasks.contracts.evaluation import (
    CurvePoint,
    Metric,
    RegressionComparison,
    RegressionMetrics,
    SliceMetrics,
    ValueBand,
)
from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore
from tasks.reporting import facts
from tasks.reporting.charts import observed_chart, residual_chart
from tasks.reporting.figures import Pictures
from tasks.reporting.search import render_search_page
from tests.support.reporting.pages import rendered
from tests.support.reporting.run_records import run_record
from tests.support.reporting.studies import study, trial

NAN = float("nan")


def metric(value: float, half: float = 0.01) -> Metric:
    return Metric(value=value, low=value - half, high=value + half)


def quality(r2: float = 0.967, mae: float = 224.0, skill: float | None = 0.65) -> RegressionMetrics:
    return RegressionMetrics(
        num_rows=4362,
        unit="vehicles",
        label_mean=3354.0,
        label_deviation=1980.0,
        r2=metric(r2),
        rmse=metric(361.0, 90),
        mae=metric(mae, 30),
        bias=metric(16.3, 40),
        skill=None if skill is None else metric(skill, 0.2),
    )


def regression_record(store: ArtifactStore) -> RunRecord:
    """The record of the other pages, as if its label were a number."""
    record = run_record(store)
    snapshot, model, drift = record.dataset.snapshot, record.model, record.drift
    columns = snapshot.columns.model_copy(update={"task": "regression", "unit": "vehicles"})
    summary = NumberSummary(mean=3321.4, deviation=1968.9, low=113, high=7280)
    epochs = [
        e.model_copy(update={"validation_auc": None, "validation_r2": 0.9}) for e in model.epochs
    ]
    differences = {"r2_difference": metric(-0.0039, 0.001), "rmse_difference": metric(21.8, 9)}
    evaluation = record.evaluation.model_copy(
        update={
            "overall": quality(),
            "baseline_model": quality(0.971, 198.0),
            "baseline": quality(0.904, 300.0, 0.0),
            "baseline_name": "last_week",
            "slices": tuple(
                SliceMetrics(
                    column="weekday",
                    value=day,
                    metrics=quality(mae=mae),
                    error_ratio=metric(mae / 200, 0.125),
                )
                for day, mae in (("Monday", 224.0), ("Friday", 196.0), ("Sunday", 252.0))
            ),
            "comparisons": (RegressionComparison(against="yardstick", **differences),),
            "roc": (),
            "precision_recall": (),
            "calibration": (),
            "observed": tuple(
                ValueBand(x=x, low=x - 300, mean=x + 20, high=x + 300, num_rows=200)
                for x in (300.0, 2500.0, 6000.0)
            ),
            "residuals": tuple(
                CurvePoint(x=x, y=50.0, weight=abs(x)) for x in (-1050.0, 0.0, 1050.0)
            ),
        }
    )
    dataset = record.dataset.model_copy(
        update={
            "snapshot": snapshot.model_copy(
                update={"columns": columns, "positive_rate": None, "label_summary": summary}
            )
        }
    )
    variants = tuple(
        v.model_copy(update={"auc_change": None, "r2_change": v.auc_change, "reason": "why"})
        for v in record.variants
    )
    after = drift.model_copy(
        update={
            "reference_performance": quality(),
            "current_performance": quality(0.9),
            "auc_change": None,
            "excess_brier_change": None,
            "r2_change": metric(-0.067),
            "skill_change": metric(-0.1),
            "evidence": (),
        }
    )
    promotion = record.promotion.model_copy(update={"gates": ()})
    return record.model_copy(
        update={
            "dataset": dataset,
            "model": model.model_copy(update={"epochs": tuple(epochs), "columns": columns}),
            "evaluation": evaluation,
            "variants": variants,
            "drift": after,
            "promotion": promotion,
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def test_the_page_of_a_regression_speaks_of_nothing_else(store: ArtifactStore) -> None:
    html, page = rendered(regression_record(store), store)
    for words in (
        "R² on the test window",
        "the baseline has 300.0, skill 0.650",
        "The model errs less than the baseline last_week",
        "Mean absolute error by weekday",
        "Change of skill",
        "R² change",
        "in standard deviations of the label",
        "between the predictions of the variant",
        "RMSE ratio",
        "RMSE difference, vehicles (left is better)",
        "+21.8 [",
        "1.120",
    ):
        assert words in page.words, words
    for word in ("AUC", "Brier", "base rate", "positive", "scores"):
        assert word not in page.words, word
    assert "r2_score" in html


def test_slices_of_a_regression_are_in_order_of_their_error(store: ArtifactStore) -> None:
    parts = facts.slices_by_column(regression_record(store))["weekday"]
    assert [part.value for part in parts] == ["Friday", "Monday", "Sunday"]


def test_a_gallery_holds_the_pictures_of_the_task(store: ArtifactStore) -> None:
    assert {"observed", "residuals"} <= Pictures(regression_record(store)).gallery().keys()
    assert {"calibration", "roc"} <= Pictures(run_record(store)).gallery().keys()


def test_pictures_are_drawn_whatever_came_out(store: ArtifactStore) -> None:
    report = regression_record(store).evaluation
    empty = report.model_copy(update={"observed": (), "residuals": ()})
    odd = report.model_copy(
        update={
            "observed": (ValueBand(x=NAN, low=0, mean=0, high=0, num_rows=1),),
            "residuals": (CurvePoint(x=0.0, y=1e-38, weight=0.0),),
            "overall": quality().model_copy(update={"bias": Metric(value=NAN, low=NAN, high=NAN)}),
        }
    )
    for one in (empty, odd):
        for drawing in (observed_chart(one), residual_chart(one)):
            assert drawing.startswith("<svg")
            assert "nan" not in drawing.lower()


def test_a_search_over_a_regression_is_told_in_r2(tmp_path: Path) -> None:
    trials = [trial(n, auc=None, r2=0.9 + 0.01 * n, epochs=[]) for n in range(3)]
    record = study(*trials, task="regression", best=2)
    html = render_search_page(record)
    assert "Best validation R²" in html
    assert "AUC" not in html
