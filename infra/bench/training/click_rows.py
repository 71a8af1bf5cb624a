"""Rows like those of clicks, made up: a large network learns them, a linear one does not."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import (
    DatasetSchema,
    DataSplits,
    FeatureSnapshot,
    ValidatedDataset,
    ValidationResult,
)
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]
LEVELS = (300, 150, 80, 50, 30, 20, 15, 12, 10, 7)
NUM_NUMBERS = 30
NUM_ROWS = 100_000
NUM_DAYS = 120
START = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = DatasetSchema(
    row_id="row",
    event_time="moment",
    label="clicked",
    categorical=tuple(f"category_{n}" for n in range(len(LEVELS))),
    numeric=tuple(f"number_{n}" for n in range(NUM_NUMBERS)),
)


def click_splits() -> DataSplits:
    """Seventy days to train on, twenty to choose, thirty to judge."""
    train, validation, test = ((0, 70), (70, 90), (90, NUM_DAYS))
    return DataSplits(train=_days(*train), validation=_days(*validation), test=_days(*test))


def click_rows(store: ArtifactStore, num_rows: int = NUM_ROWS, seed: int = 0) -> ValidatedDataset:
    """The rows as a snapshot; its label is a draw, so no model reaches an AUC of 1."""

    def build(folder: StagedFolder) -> ValidatedDataset:
        rows = _frame(np.random.default_rng(seed), num_rows)
        rows.to_parquet(folder.path / "rows.parquet", row_group_size=4096, index=False)
        (folder.path / "validation.json").write_text(json.dumps({"success": True}))
        snapshot = FeatureSnapshot(
            data=folder.artifact("rows.parquet"),
            num_rows=len(rows),
            window=_days(0, NUM_DAYS),
            columns=COLUMNS,
            feature_service="clicks",
            feature_views={},
            tables_version="",
            label_definition="a draw from a made-up probability",
            positive_rate=float(rows[COLUMNS.label].mean()),
            excluded=(),
        )
        vouched = ValidationResult(
            suite="none",
            subject="snapshot",
            subject_sha256=snapshot.data.sha256,
            num_rows=len(rows),
            num_expectations=1,
            result=folder.artifact("validation.json"),
        )
        return ValidatedDataset(snapshot=snapshot, validation=vouched)

    return store.build_once("clicks", content_key(seed, num_rows, LEVELS), ValidatedDataset, build)


def _days(start: int, end: int) -> TimeWindow:
    return TimeWindow(start=START + timedelta(days=start), end=START + timedelta(days=end))


def _frame(rng: np.random.Generator, num_rows: int) -> pd.DataFrame:
    seconds = np.sort(rng.integers(0, NUM_DAYS * 86400, num_rows))
    numbers = rng.normal(size=(num_rows, NUM_NUMBERS))
    numbers[:, 0] = rng.lognormal(0, 1.5, num_rows)  # a heavy tail, which clicks have
    levels = [rng.integers(0, n, num_rows) for n in LEVELS]
    logit = _logit(rng, numbers, levels)
    data: dict[str, object] = {
        COLUMNS.row_id: np.arange(num_rows),
        COLUMNS.event_time: pd.to_datetime(START) + pd.to_timedelta(seconds, unit="s"),
        COLUMNS.label: (rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(np.int8),
    }
    data |= {
        name: pd.Series(level).map(lambda value: f"v{value}")
        for name, level in zip(COLUMNS.categorical, levels, strict=True)
    }
    missing = rng.random(num_rows) < 0.1
    for name, column in zip(COLUMNS.numeric, numbers.T, strict=True):
        data[name] = column.astype(np.float32)
    data[COLUMNS.numeric[-1]] = np.where(missing, np.nan, numbers[:, -1]).astype(np.float32)
    return pd.DataFrame(data)


def _logit(
    rng: np.random.Generator, numbers: Float64Array, levels: list[Int64Array]
) -> Float64Array:
    """Effects of categories, of some numbers, and of pairs of both."""
    effects = [rng.normal(0, 0.5, n) for n in LEVELS]
    logit = sum(
        (e[level] for e, level in zip(effects, levels, strict=True)), np.zeros(len(numbers))
    )
    logit += 0.4 * np.log1p(numbers[:, 0]) + 0.5 * numbers[:, 1] - 0.4 * np.abs(numbers[:, 2])
    logit += 0.6 * numbers[:, 3] * numbers[:, 4] + 0.5 * np.sin(2 * numbers[:, 5])
    return np.asarray(logit + 0.5 * effects[0][levels[0]] * numbers[:, 6] - 1.2)
