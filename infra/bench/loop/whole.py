"""The whole loop: with Prefect, once more with nothing changed, and as plain functions.

The first run is that of the state folder which other measurements read.
"""

from __future__ import annotations

import pandas as pd
from sklearn.metrics import roc_auc_score

from infra.bench.figures import Figure, Measured, at_least, at_most
from infra.bench.finished import newest_record
from infra.bench.loop.cost import FIRST_RUN, read_cost, run_measured
from infra.bench.parts import Bench
from tasks.kernel.settings import Settings

GIB = 2**30


def figures(bench: Bench) -> Measured:
    """Cost of the loop, what Prefect adds to it, and how good its model is."""
    settings, log = bench.settings, bench.folder / "log.txt"
    first = read_cost(settings.home.parent / FIRST_RUN)
    second = run_measured(["-m", "falaj", "--home", str(settings.home), "run"], log)
    plain = run_measured(["-m", "infra.bench.loop.plain", str(bench.folder / "plain")], log)
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
        if variant.accepted
        for at in variant.latencies
        if at.batch_rows == 1
    )
    return [
        at_least("AUC of the test months", ours, 0.745, f"on {len(rows):,} stored scores"),
        at_least("AUC minus gradient boosting", ours - theirs, -0.005, f"it has {theirs:.4f}"),
        at_most("best variant to PyTorch eager, batch 1", ratio, 0.5, name),
    ]
