"""`make bench`: every figure of README, measured in one run, as a ratio or against its bound.

Three loops run in state folders of their own: through Prefect, again on the same state, and as
plain functions. Exit code 1 where a figure misses its bound.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from sklearn.metrics import roc_auc_score

from infra.bench.measure import Cost, run_measured
from infra.bench.retrieval import compare_retrieval
from tasks.contracts import RunRecord
from tasks.settings import Settings

GIB = 2**30


@dataclass(frozen=True)
class Figure:
    """One measured figure and the bound it must keep."""

    name: str
    value: float
    bound: float
    at_least: bool
    evidence: str

    @property
    def holds(self) -> bool:
        """True where the figure keeps its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """The figure as one line of the table."""
        sign = ">=" if self.at_least else "<="
        state = "ok  " if self.holds else "MISS"
        return (
            f"{state}  {self.name:<44}{self.value:>9.3f}  {sign} {self.bound:<8g} {self.evidence}"
        )


def main() -> int:
    """Measure, print the table, and say by the exit code whether all figures hold."""
    with tempfile.TemporaryDirectory(prefix="falaj-bench-") as scratch:
        folder = Path(scratch)
        log = folder / "log.txt"
        home, plain_home = folder / "prefect", folder / "plain"
        _say("the whole loop on a new state folder")
        first = run_measured(["-m", "flows", "--home", str(home), "run"], log)
        _say("the same again, with nothing changed")
        second = run_measured(["-m", "flows", "--home", str(home), "run"], log)
        _say("the same functions on a new state folder, without Prefect")
        plain = run_measured(["-m", "infra.bench.plain", str(plain_home)], log)
        os.environ["FALAJ_HOME"] = str(home)
        settings = Settings.from_environment()
        facts = json.loads((settings.reports / "latest" / "report.json").read_text())
        record = RunRecord.model_validate({k: facts[k] for k in RunRecord.model_fields})
        _say("historical retrieval, through Feast and in plain DuckDB, in turn")
        figures = [
            *_loop_figures(first, second, plain),
            *_model_figures(record, settings),
            *_retrieval_figures(settings),
        ]
    sys.stdout.write("\n" + "\n".join(figure.line() for figure in figures) + "\n")
    return 0 if all(figure.holds for figure in figures) else 1


def _loop_figures(first: Cost, second: Cost, plain: Cost) -> list[Figure]:
    seconds = f"{first.wall_s:.0f} s with Prefect, {plain.wall_s:.0f} s without"
    return [
        Figure("loop, minutes", first.wall_s / 60, 6, False, f"{first.wall_s:.0f} s"),
        Figure("loop, peak memory GiB", first.peak_bytes / GIB, 6, False, "whole process tree"),
        Figure("second run, seconds", second.wall_s, 30, False, "nothing changed"),
        Figure("orchestration, share", first.wall_s / plain.wall_s - 1, 0.1, False, seconds),
    ]


def _model_figures(record: RunRecord, settings: Settings) -> list[Figure]:
    rows = pd.read_parquet(settings.store.path(record.evaluation.predictions))
    label = rows[record.dataset.snapshot.columns.label]
    ours = float(roc_auc_score(label, rows["score"]))
    theirs = float(roc_auc_score(label, rows["yardstick_score"]))
    at_one = [
        (at.ratio_to_eager, variant.name)
        for variant in record.variants
        if variant.kept
        for at in variant.latencies
        if at.batch_rows == 1
    ]
    best, name = min(at_one)
    return [
        Figure("AUC of the test months", ours, 0.745, True, f"on {len(rows):,} stored scores"),
        Figure("AUC minus gradient boosting", ours - theirs, -0.005, True, f"it has {theirs:.4f}"),
        Figure("best variant to PyTorch eager, batch 1", best, 0.5, False, name),
    ]


def _retrieval_figures(settings: Settings) -> list[Figure]:
    from flows.config import read_pipeline_config

    config = read_pipeline_config(settings.feature_repo)
    feast_s, plain_s, differing = compare_retrieval(config, settings)
    seconds = f"{feast_s:.1f} s to {plain_s:.1f} s"
    return [
        Figure("retrieval by Feast to plain ASOF join", feast_s / plain_s, 3, False, seconds),
        Figure("rows that differ between the two", float(differing), 0, False, "all columns"),
    ]


def _say(what: str) -> None:
    sys.stdout.write(f"measuring {what} ...\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
