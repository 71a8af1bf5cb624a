"""Small valid inputs for tests: seeded, built through the project's own contracts and store."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import (
    DatasetSchema,
    DataSplits,
    ExcludedRows,
    FeatureSnapshot,
    NumberSummary,
    ValidatedDataset,
    ValidationResult,
)
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key

YEAR = TimeWindow(start=datetime(2013, 1, 1, tzinfo=UTC), end=datetime(2014, 1, 1, tzinfo=UTC))
COLUMNS = DatasetSchema(
    row_id="flight_id",
    event_time="event_timestamp",
    label="is_late",
    categorical=("carrier", "origin", "dest"),
    numeric=("distance", "minute_of_day", "late_rate_24h", "temp", "gust"),
)


def month(number: int, count: int = 1) -> TimeWindow:
    """`count` months of 2013, from month `number` (1 to 12) on."""
    moments = [
        datetime(2013 + (m - 1) // 12, (m - 1) % 12 + 1, 1, tzinfo=UTC)
        for m in (number, number + count)
    ]
    return TimeWindow(start=moments[0], end=moments[1])


def splits() -> DataSplits:
    """January to June, July and August, September to December."""
    return DataSplits(train=month(1, 6), validation=month(7, 2), test=month(9, 4))


def frame(num_rows: int = 4000, seed: int = 0) -> pd.DataFrame:
    """Rows over all of 2013 in order of time, with nulls, whose label a small network can learn."""
    rng = np.random.default_rng(seed)
    seconds = np.sort(rng.integers(0, 365 * 24 * 3600, num_rows))
    times = [YEAR.start + timedelta(seconds=int(s)) for s in seconds]
    late_rate = rng.beta(2, 6, num_rows)
    minute = rng.integers(5 * 60, 23 * 60, num_rows)
    carrier = rng.choice(["AA", "UA", "EV", "B6"], num_rows)
    logit = 6 * (late_rate - 0.25) + (minute - 840) / 400 + (carrier == "EV") * 0.8 - 1.2
    gust = np.where(rng.random(num_rows) < 0.8, np.nan, rng.gamma(4, 6, num_rows))
    data = pd.DataFrame(
        {
            COLUMNS.row_id: np.arange(num_rows, dtype=np.int64),
            COLUMNS.event_time: pd.Series(times).astype("datetime64[us, UTC]"),
            COLUMNS.label: (rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(np.int8),
            "carrier": carrier,
            "origin": rng.choice(["EWR", "JFK", "LGA"], num_rows),
            "dest": rng.choice(["IAH", "MIA", "ORD", "LAX", "ATL"], num_rows),
            "distance": rng.integers(100, 2500, num_rows).astype(np.float32),
            "minute_of_day": minute.astype(np.float32),
            "late_rate_24h": late_rate.astype(np.float32),
            "temp": rng.normal(55, 18, num_rows).astype(np.float32),
            "gust": gust.astype(np.float32),
        }
    )
    data.loc[rng.random(num_rows) < 0.03, "dest"] = None
    return data


def dataset(
    store: ArtifactStore, data: pd.DataFrame | None = None, columns: DatasetSchema = COLUMNS
) -> ValidatedDataset:
    """Store `data` (default `frame()`) as a snapshot, with a result that vouches for it."""
    rows = frame() if data is None else data
    key = content_key(rows.to_json(date_format="iso"), *([columns] if columns != COLUMNS else []))
    labels, summary = rows[columns.label], None
    if columns.task == "regression":
        summary = NumberSummary(
            mean=labels.mean(), deviation=labels.std(), low=labels.min(), high=labels.max()
        )

    def build(folder: StagedFolder) -> ValidatedDataset:
        rows.to_parquet(folder.path / "data.parquet", row_group_size=256, index=False)
        (folder.path / "validation.json").write_text(json.dumps({"success": True}))
        snapshot = FeatureSnapshot(
            data=folder.artifact("data.parquet"),
            num_rows=len(rows),
            window=YEAR,
            columns=columns,
            feature_service="flight_delay_v1",
            feature_views={"carrier_stats": "0" * 32},
            tables_version="0" * 32,
            label_definition="arrives more than 15 minutes late",
            positive_rate=None if summary else float(rows[columns.label].mean()),
            label_summary=summary,
            excluded=(ExcludedRows(reason="cancelled", num_rows=7),),
        )
        validation = ValidationResult(
            suite="training_set",
            subject="snapshot",
            subject_sha256=snapshot.data.sha256,
            num_rows=len(rows),
            num_expectations=3,
            result=folder.artifact("validation.json"),
        )
        return ValidatedDataset(snapshot=snapshot, validation=validation)

    return store.build_once("snapshots", key, ValidatedDataset, build)
