"""`make bench`: every figure of README, measured in one run, as a ratio or against its bound.

    python -m infra.bench [loop] [features] [training] [conversion] [serving] [operation]

`loop`: three loops in state folders of their own, through Prefect, again on the same state, and as
plain functions. `features`: the feature store's own parts against Feast's and against plain DuckDB
and Redis. `training`: ranks against torch DDP and against ranks that do not talk, start, reading,
checkpoints, compression, lost ranks, smaller networks. `conversion`: variants of the loop's model
and of a sentence encoder against PyTorch and ONNX Runtime, in CPU time. `serving`: cost of an
answer beside the model alone and other servers, overload, swaps, roll back, the edge, the log of
predictions, entity requests, simulated releases. `operation`: the platform's start and idle cost,
leases, the way from a verdict to its retraining, stages on work pools. All without an argument.
Exit code 1 where a figure misses its bound.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from sklearn.metrics import roc_auc_score

from flows.config import PipelineConfig, read_pipeline_config
from infra.bench.checkpoints import checkpoint_figures
from infra.bench.compression import compression_figures
from infra.bench.conversion import conversion_figures
from infra.bench.elastic import measure_elastic
from infra.bench.false_alarms import count_false_alarms
from infra.bench.figures import Figure, at_least, at_most
from infra.bench.finished import newest_record
from infra.bench.governor import governor_figures
from infra.bench.launch import launch_figures
from infra.bench.leases import lease_figures
from infra.bench.materialization import compare_materialization
from infra.bench.measure import Cost, run_measured
from infra.bench.online_read import compare_online_reads
from infra.bench.platform import platform_figures
from infra.bench.reading import reading_figures
from infra.bench.retrieval import retrieval_figures
from infra.bench.routing import routing_figures
from infra.bench.serving_parts import serving_figures
from infra.bench.smaller_models import smaller_model_figures
from infra.bench.strategies import strategy_figures
from infra.bench.telemetry import clock_cost
from tasks.settings import Settings

GIB = 2**30
PARTS_OF_A_LOOP = ("loop", "features", "training", "conversion", "serving")
"""Those that read the state folder of a finished loop."""
PARTS = (*PARTS_OF_A_LOOP, "operation")
NUM_KEYS = 336_776
"""Entities in the materialization figures: one a flight."""


def main(parts: list[str]) -> int:
    """Measure, print the table, and say by the exit code whether all figures hold."""
    if unknown := sorted(set(parts) - set(PARTS)):
        sys.stderr.write(f"no part {', '.join(unknown)}; there are: {', '.join(PARTS)}\n")
        return 2
    # What a bench started ends with it, a platform too, which needs its turn.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="falaj-bench-") as scratch:
        figures = _measure(Path(scratch), parts or list(PARTS))
    sys.stdout.write("\n" + "\n".join(figure.line() for figure in figures) + "\n")
    return 0 if all(figure.holds for figure in figures) else 1


def _measure(folder: Path, parts: list[str]) -> list[Figure]:
    figures: list[Figure] = []
    if set(parts) & set(PARTS_OF_A_LOOP):
        figures += _figures_of_a_loop(folder, parts)
    return figures + (_operation_figures() if "operation" in parts else [])


def _figures_of_a_loop(folder: Path, parts: list[str]) -> list[Figure]:
    log, home = folder / "log.txt", folder / "prefect"
    _say("the whole loop on a new state folder")
    first = run_measured(["-m", "flows", "--home", str(home), "run"], log)
    os.environ["FALAJ_HOME"] = str(home)
    settings = Settings.from_environment()
    figures = _loop_figures(folder, first, settings) if "loop" in parts else []
    figures += _feature_figures(settings) if "features" in parts else []
    figures += _training_figures(folder, settings) if "training" in parts else []
    figures += _conversion_figures(folder, settings) if "conversion" in parts else []
    serving = serving_figures(settings, folder / "serving") if "serving" in parts else []
    return figures + _measured(serving)


def _training_figures(folder: Path, settings: Settings) -> list[Figure]:
    config = read_pipeline_config(settings.feature_repo)
    measured: list[tuple[str, Callable[[], list[Figure]]]] = [
        ("ranks on Horovod, on DDP and alone", strategy_figures),
        ("the start of ranks", launch_figures),
        ("reading from disk", lambda: reading_figures(settings, folder)),
        ("compressed gradients", lambda: compression_figures(config, settings)),
        ("checkpoints", checkpoint_figures),
        ("ranks lost and added", measure_elastic),
        ("the step clock", clock_cost),
        ("smaller networks", lambda: smaller_model_figures(settings, folder)),
    ]
    return _measured(measured)


def _conversion_figures(folder: Path, settings: Settings) -> list[Figure]:
    _say("variants of the tabular model and of the encoder")
    return conversion_figures(settings, folder / "encoder")


def _operation_figures() -> list[Figure]:
    return _measured(
        [
            ("the platform", platform_figures),
            ("leases of devices", lease_figures),
            ("from a verdict to its retraining", governor_figures),
            ("stages on work pools", routing_figures),
        ]
    )


def _measured(parts: list[tuple[str, Callable[[], list[Figure]]]]) -> list[Figure]:
    figures: list[Figure] = []
    for what, measure in parts:
        _say(what)
        figures += measure()
    return figures


def _loop_figures(folder: Path, first: Cost, settings: Settings) -> list[Figure]:
    log = folder / "log.txt"
    _say("the same again, with nothing changed")
    second = run_measured(["-m", "flows", "--home", str(settings.home), "run"], log)
    _say("the same functions on a new state folder, without Prefect")
    plain = run_measured(["-m", "infra.bench.plain", str(folder / "plain")], log)
    seconds = f"{first.wall_s:.0f} s with Prefect, {plain.wall_s:.0f} s without"
    return [
        at_most("loop, minutes", first.wall_s / 60, 6, f"{first.wall_s:.0f} s"),
        at_most("loop, peak memory GiB", first.peak_bytes / GIB, 6, "whole process tree"),
        at_most("second run, seconds", second.wall_s, 30, "nothing changed"),
        at_most("orchestration, share", first.wall_s / plain.wall_s - 1, 0.1, seconds),
        *_model_figures(settings),
    ]


def _model_figures(settings: Settings) -> list[Figure]:
    record = newest_record(settings)
    rows = pd.read_parquet(settings.store.path(record.evaluation.predictions))
    label = rows[record.dataset.snapshot.columns.label]
    ours = float(roc_auc_score(label, rows["score"]))
    theirs = float(roc_auc_score(label, rows["yardstick_score"]))
    ratio, name = min(
        (at.ratio_to_eager, variant.name)
        for variant in record.variants
        if variant.kept
        for at in variant.latencies
        if at.batch_rows == 1
    )
    return [
        at_least("AUC of the test months", ours, 0.745, f"on {len(rows):,} stored scores"),
        at_least("AUC minus gradient boosting", ours - theirs, -0.005, f"it has {theirs:.4f}"),
        at_most("best variant to PyTorch eager, batch 1", ratio, 0.5, name),
    ]


def _feature_figures(settings: Settings) -> list[Figure]:
    config = read_pipeline_config(settings.feature_repo)
    _say("historical retrieval: the plug-in, plain DuckDB and Feast's DuckDB store, in turn")
    retrieval = retrieval_figures(config, settings)
    _say("materialization to Redis and SQLite: the engine and Feast's own, in turn")
    materialization = _materialization_figures()
    _say("online reads from Redis: the reader, raw HMGET and Feast's SDK, in turn")
    reads = [
        figure
        for at in compare_online_reads(config, settings)
        for figure in (
            at_most(
                f"online read of {at.num_entities} to raw HMGET, p50",
                at.ours_ms / at.raw_ms,
                3,
                f"{at.ours_ms:.2f} ms; Feast's SDK {at.feast_ms / at.raw_ms:.1f}",
            ),
            at_most("values that differ from Feast's", float(at.num_differing), 0, "all features"),
        )
    ]
    _say("false alarms: every suite on every day of the year")
    return [*retrieval, *materialization, *reads, *_alarm_figures(config, settings)]


def _materialization_figures() -> list[Figure]:
    rates = compare_materialization(NUM_KEYS, rounds=1)
    differing = rates.differing_hashes + rates.differing_rows
    return [
        at_least(
            "rows/s to Redis, engine to Feast's own",
            rates.vector_redis / rates.feast_redis,
            8,
            f"{rates.vector_redis:,.0f} to {rates.feast_redis:,.0f}, newer wins",
        ),
        at_least(
            "rows/s to Redis, engine to raw HSET",
            rates.vector_redis / rates.raw_redis,
            0.5,
            f"raw pipeline {rates.raw_redis:,.0f}",
        ),
        at_least(
            "rows/s to SQLite, engine to Feast's own",
            rates.vector_sqlite / rates.feast_sqlite,
            3,
            f"{rates.vector_sqlite:,.0f} to {rates.feast_sqlite:,.0f}",
        ),
        at_most("stored bytes that differ from Feast's", float(differing), 0, "all entities"),
    ]


def _alarm_figures(config: PipelineConfig, settings: Settings) -> list[Figure]:
    found = count_false_alarms(config, settings)
    return [
        at_most(
            "daily windows with a false alarm, share",
            found.rate,
            0.01,
            f"{found.days} of {found.num_days} days, {found.judged:,} judgements",
        ),
        at_most(
            "the same after the blessed window, share",
            found.later_rate,
            0.01,
            f"{found.later} of {found.num_later} days",
        ),
    ]


def _say(what: str) -> None:
    sys.stdout.write(f"measuring {what} ...\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
