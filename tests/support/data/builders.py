"""Small valid inputs for tests: seeded, built through the project's own contracts and store."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts.base import Artifact, ModelVersionRef, TimeWindow
from tasks.contracts.data import (
    DatasetSchema,
    DataSplits,
    ExcludedRows,
    FeatureSnapshot,
    NumberSummary,
    ValidatedDataset,
    ValidationResult,
)
from tasks.contracts.drift import FeatureDrift
from tasks.contracts.evaluation import Metric, MetricSet
from tasks.contracts.release import ModelVariant
from tasks.contracts.training import CompressedModel, EpochMetrics, ModelCompression, TrainedModel
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


CLASSES = COLUMNS.model_copy(
    update={"task": "multi-class", "classes": ("early", "on time", "late"), "label": "arrival"}
)
"""The columns, with a label that is one of three."""


def rows_in(window: TimeWindow, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of a window, numbered anew."""
    moments = rows[COLUMNS.event_time]
    return rows[(moments >= window.start) & (moments < window.end)].reset_index(drop=True)


def class_frame(num_rows: int = 3000) -> pd.DataFrame:
    """The rows of `frame` with the number of one of three classes, the first of them rarer."""
    data, rng = frame(num_rows), np.random.default_rng(3)
    pull = 5 * (data["late_rate_24h"] - 0.25) + (data["carrier"] == "EV") * 0.8
    pull += (data["minute_of_day"] - 840) / 400
    data[CLASSES.label] = np.digitize(pull + rng.logistic(0, 0.8, num_rows), [-1.5, 0.8])
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
            positive_rate=float(labels.mean()) if columns.task == "classification" else None,
            label_summary=summary,
            excluded=(ExcludedRows(reason="cancelled", num_rows=7),),
            parts=folder.parts("data.parquet"),
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


def version_ref(
    program_sha256: str = "0" * 64, snapshot_sha256: str = "0" * 64, **changes: Any
) -> ModelVersionRef:
    """Version 3 of a model, unless `changes` say otherwise."""
    fields = {"name": "late-arrival", "version": 3, "run_id": "0" * 32, **changes}
    return ModelVersionRef(program_sha256=program_sha256, snapshot_sha256=snapshot_sha256, **fields)


def epoch(number: int = 0, auc: float | None = 0.7, **changes: Any) -> EpochMetrics:
    """One epoch of a second."""
    usual = {"train_loss": 0.5, "validation_loss": 0.5, "learning_rate": 0.01, "seconds": 1.0}
    fields = {**usual, "rows_per_s": 1000.0, **changes}
    return EpochMetrics(epoch=number, validation_auc=auc, **fields)


def metric(value: float, spread: float = 0.01) -> Metric:
    return Metric(value=value, low=value - spread, high=value + spread)


def metric_set(auc: float = 0.75, error: float = 0.01, num_rows: int = 4000) -> MetricSet:
    return MetricSet(
        num_rows=num_rows,
        base_rate=0.2,
        auc=metric(auc),
        pr_auc=metric(0.48),
        brier=metric(0.13),
        log_loss=metric(0.42),
        calibration_error=metric(error, 0.002),
    )


def feature_drift(name: str, effect: float, low: float, drifted: bool) -> FeatureDrift:
    """Drift of one feature, PSI growing with the square of the effect."""
    result = "above" if drifted else "below"
    return FeatureDrift(
        feature=name, kind="numeric", psi=6.1 * effect**2, psi_noise=0.0006, effect=effect,
        effect_low=low, missing_reference=0.02, missing_current=0.03, drifted=drifted,
        evidence=f"effect {effect:.3f}, at least {low:.3f}, {result} the threshold 0.10",
    )  # fmt: skip


def variant(source_sha256: str, files: Artifact | None, **changes: Any) -> ModelVariant:
    """An ONNX variant that was accepted."""
    fields: dict[str, Any] = {
        "name": "onnx-fp32",
        "format": "onnx",
        "precision": "fp32",
        "hardware_class": "cpu",
        "parity_max": 2e-6,
        "parity_mean": 1e-7,
        "latencies": (),
        "num_bytes": files.num_bytes if files else 0,
        "load_ms": 12.5,
        "accepted": True,
        "reason": "Kept.",
        "settings": {},
        **changes,
    }
    return ModelVariant(files=files, source_sha256=source_sha256, **fields)


def trained_model(
    program: Artifact, snapshot_sha256: str = "0" * 64, **changes: Any
) -> TrainedModel:
    """A training result whose program, checkpoint and log are this artifact."""
    fields: dict[str, Any] = {
        "columns": COLUMNS,
        "config": {},
        "splits": splits(),
        "epochs": (),
        "best_epoch": 0,
        "num_ranks": 1,
        "strategy": "horovod",
        "num_parameters": 1,
        "seconds": 1.0,
        **dict.fromkeys(("program", "checkpoint", "log"), program),
        **changes,
    }
    return TrainedModel(snapshot_sha256=snapshot_sha256, **fields)


def compression(parent: ModelVersionRef, **changes: Any) -> ModelCompression:
    """How a smaller network was made of a version; by distillation if not told."""
    usual = {"method": "distillation", "settings": {"hidden_sizes": [8]}, "is_distilled": True}
    fields = {**usual, "parent_sizes": (32,), "parent_parameters": 5_000, **changes}
    return ModelCompression(parent=parent, **fields)


def compressed_model(trained: TrainedModel, made: ModelCompression) -> CompressedModel:
    """The training result as that of a smaller network."""
    content = {**trained.model_dump(), "compression": made.model_dump()}
    return CompressedModel.model_validate(content)


def edited(value: Any, path: str, new: object) -> Any:
    """A copy in which the field at the end of a dotted path (numbers index tuples) is `new`."""
    head, _, rest = path.partition(".")
    old = getattr(value, head)
    if not rest:
        return value.model_copy(update={head: new})
    if isinstance(old, tuple):
        index, _, rest = rest.partition(".")
        items = list(old)
        items[int(index)] = edited(items[int(index)], rest, new)
        return value.model_copy(update={head: tuple(items)})
    return value.model_copy(update={head: edited(old, rest, new)})


def changed(value: Any, changes: Mapping[str, object]) -> Any:
    """A copy with other fields, each named by its dotted path."""
    return reduce(lambda made, change: edited(made, *change), changes.items(), value)
