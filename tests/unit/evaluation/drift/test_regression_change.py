from __future__ import annotations

import pytest

from tasks.contracts.base import Artifact
from tasks.contracts.evaluation import Metric, RegressionMetrics, ScoredWindow
from tasks.evaluation.drift.config import DriftConfig
from tasks.evaluation.drift.performance import RegressionChange, performance_change
from tests.support.data.builders import month

CONFIG = DriftConfig(min_r2_drop=0.02, min_skill_drop=0.05)
NOTHING = Artifact(uri="artifact:scores/1/scores.parquet", sha256="0" * 64, num_bytes=1)


def metric(value: float, spread: float) -> Metric:
    return Metric(value=value, low=value - spread, high=value + spread)


def change(r2: float, skill: float | None, spread: float = 0.01) -> RegressionChange:
    return RegressionChange(metric(r2, spread), None if skill is None else metric(skill, spread))


def window(r2: float, skill: float | None) -> ScoredWindow:
    metrics = RegressionMetrics(
        num_rows=500,
        unit="vehicles",
        label_mean=3000.0,
        label_deviation=900.0,
        r2=metric(r2, 0.01),
        rmse=metric(200, 9),
        mae=metric(150, 9),
        bias=metric(0, 9),
        skill=None if skill is None else metric(skill, 0.02),
    )
    return ScoredWindow(
        program_sha256="1" * 64,
        snapshot_sha256="2" * 64,
        window=month(9),
        num_rows=500,
        scores=NOTHING,
        metrics=metrics,
        excess_brier=None,
    )


@pytest.mark.parametrize(
    ("r2", "skill", "fell", "stale"),
    [
        (0.0, 0.0, False, False),
        (-0.05, 0.0, True, False),  # a harder month: the baseline errs more too
        (-0.05, -0.2, True, True),
        (0.0, -0.2, False, True),  # an easier month hides from R2 what the model lost
        (0.0, -0.03, False, False),  # too little to matter
        (-0.05, None, True, True),  # nothing tells the month from the model
    ],
)
def test_a_model_is_stale_where_it_loses_against_the_baseline(
    r2: float, skill: float | None, fell: bool, stale: bool
) -> None:
    seen = change(r2, skill)
    assert (seen.fell(CONFIG), seen.went_stale(CONFIG)) == (fell, stale)


def test_a_change_within_its_interval_is_none() -> None:
    seen = change(-0.3, -0.3, spread=0.4)
    assert not seen.fell(CONFIG)
    assert not seen.went_stale(CONFIG)


def test_the_change_is_current_minus_reference() -> None:
    seen = performance_change(window(0.95, 0.6), window(0.90, 0.4))
    assert isinstance(seen, RegressionChange)
    assert seen.r2.value == pytest.approx(-0.05)
    assert seen.skill is not None
    assert seen.skill.value == pytest.approx(-0.2)


def test_a_skill_that_only_one_window_has_is_not_compared() -> None:
    seen = performance_change(window(0.95, 0.6), window(0.90, None))
    assert isinstance(seen, RegressionChange)
    assert seen.skill is None
