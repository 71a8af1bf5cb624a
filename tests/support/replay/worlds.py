"""A small history to replay: a year of made-up rows whose relation to the label may change."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd

from flows.config import PipelineConfig, read_pipeline_config
from flows.replay.history import History
from tasks.contracts.base import TimeWindow
from tasks.contracts.clock import ClockConfig
from tasks.contracts.data import DataSplits
from tasks.evaluation.config import BaselineModelConfig, DriftConfig, EvaluationConfig
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tasks.registry.config import PromotionConfig
from tasks.training.config import TrainingConfig
from tasks.training.models.config import BoostingConfig
from tests.support.data import builders

START = datetime(2013, 1, 1, tzinfo=UTC)
FLIGHTS = PROJECT_ROOT / "feature_repo" / "flights"


def window(first: int, last: int) -> TimeWindow:
    """Days of the year, from 0; the last is not in it."""
    return TimeWindow(start=START + timedelta(days=first), end=START + timedelta(days=last))


def use_case() -> PipelineConfig:
    """The flights with a small model, and windows of a fortnight."""
    splits = DataSplits(train=window(0, 180), validation=window(180, 240), test=window(240, 365))
    return read_pipeline_config(FLIGHTS).model_copy(
        update={
            "splits": splits,
            "window": window(0, 365),
            "clock": ClockConfig(
                label_hours=24, drift_days=14, min_train_days=14, validation_days=14, test_days=14
            ),
            "training": TrainingConfig(
                model="gradient-boosting",
                boosting=BoostingConfig(max_iterations=12, learning_rate=0.3, min_leaf_rows=20),
            ),
            "baseline_model": BaselineModelConfig(max_iterations=12, min_leaf_rows=20),
            "evaluation": EvaluationConfig(slices=("origin",), min_slice_rows=50, min_days=4),
            "promotion": PromotionConfig(
                min_slice_auc=0.0, max_calibration_error=1, baseline_model_margin=0.2,
                champion_margin=0.05, required_hardware=(),
            ),
            "drift": DriftConfig(min_days=4),
        }
    )  # fmt: skip


def rows(changed_on: int | None = None, num_rows: int = 9_000) -> pd.DataFrame:
    """A year; from a day on, the temperature makes the label likely, and nothing else does."""
    data = builders.frame(num_rows)
    if changed_on is None:
        return data
    rng = np.random.default_rng(1)
    late = (data[builders.COLUMNS.event_time] >= START + timedelta(days=changed_on)).to_numpy()
    pull = (data["temp"] - 55) / 6 - 1.2
    turned = rng.random(len(data)) < 1 / (1 + np.exp(-pull))
    data.loc[late, builders.COLUMNS.label] = turned[late].astype(np.int8)
    return data


def history(home: Path, data: pd.DataFrame | None = None) -> History:
    """The history of these rows in a state folder of its own."""
    settings = Settings.from_environment(
        {"FALAJ_HOME": str(home), "FALAJ_FEATURE_REPO": str(FLIGHTS)}
    )
    dataset = builders.dataset(settings.store, rows() if data is None else data)
    return History(use_case(), dataset, settings)
