"""The whole loop: with Prefect, once more with nothing changed, and as plain functions.

    python -m infra.bench.loop STATE_FOLDER        runs it as plain functions

The first run is that of the state folder which other measurements read.

Measure whole commands: wall time, CPU, and peak resident memory of the process tree.
"""

import json
import logging
import os
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import psutil
from sklearn.metrics import roc_auc_score

from infra.bench.figures import Figure, Measured, at_least, at_most, children_cpu_s
from infra.bench.parts import Bench, newest_record
from infra.bench.processes import run_python
from tasks.kernel.settings import Settings

FIRST_RUN = "first-run.json"
"""Beside the state folder of a loop: what its first run took."""


class Cost(NamedTuple):
    """What one command took."""

    wall_s: float
    peak_bytes: int
    cpu_s: float


def run_measured(
    arguments: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Cost:
    """Run `python <arguments>` from the project's root, with these variables or this process's own.

    Memory is the largest sum of proportional set sizes over the command and all its descendants,
    sampled twice a second; shared pages count once. CPU is that of all that was waited for.

    Raises:
        RuntimeError: it failed.
    """
    sizes, before = list[int](), children_cpu_s()
    seconds = run_python(
        arguments, log, environment, 3600, lambda pid: sizes.append(tree_bytes(pid))
    )
    return Cost(seconds, max(sizes), children_cpu_s() - before)


def tree_bytes(pid: int) -> int:
    """Proportional set size of all that a process has started, in bytes."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for member in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += member.memory_full_info().pss
    return total


GIB = 2**30


def whole(bench: Bench) -> Measured:
    """Cost of the loop, what Prefect adds to it, and how good its model is."""
    settings, log = bench.settings, bench.folder / "log.txt"
    first = Cost(*json.loads((settings.home.parent / FIRST_RUN).read_text()))
    second = run_measured(["-m", "falaj", "--home", str(settings.home), "run"], log)
    plain = run_measured(["-m", "infra.bench.loop", str(bench.folder / "plain")], log)
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
    timed = [(at, each.name) for each in record.variants if each.accepted for at in each.latencies]
    ratio, name = min((at.ratio_to_eager, name) for at, name in timed if at.batch_rows == 1)
    return [
        at_least("AUC of the test months", ours, 0.745, f"on {len(rows):,} stored scores"),
        at_least("AUC minus gradient boosting", ours - theirs, -0.005, f"it has {theirs:.4f}"),
        at_most("best variant to PyTorch eager, batch 1", ratio, 0.5, name),
    ]


def without_prefect() -> None:
    """Make every flow and task a plain call, and every Prefect artifact nothing."""
    import prefect
    import prefect.artifacts
    import prefect.logging
    import prefect.states

    def call(self: Any, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:
        result = self.fn(*args, **kwargs)
        return prefect.states.Completed(data=result) if return_state else result

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def logger(*args: Any, **kwargs: Any) -> logging.Logger:
        return logging.getLogger("plain")

    prefect.Task.__call__ = call  # type: ignore[method-assign, assignment]
    prefect.Flow.__call__ = call  # type: ignore[method-assign, assignment]
    for name in ("table", "markdown", "image", "link", "progress"):
        setattr(prefect.artifacts, f"create_{name}_artifact", nothing)
    prefect.artifacts.update_progress_artifact = nothing  # type: ignore[assignment]
    prefect.get_run_logger = prefect.logging.get_run_logger = logger


def main(home: str) -> None:
    """Run the loop once on the state folder `home`, as plain functions: what Prefect adds to.

    Nothing is recorded, cached or retried by Prefect; all else is the same code on the same data.
    """
    os.environ["FALAJ_HOME"] = home
    for name in ("ID", "ROOT_FLOW_RUN_ID"):  # lineage names the flow run that a step belongs to
        os.environ[f"PREFECT__RUNTIME__FLOW_RUN__{name}"] = str(uuid.UUID(int=1))
    os.environ["PREFECT__RUNTIME__FLOW_RUN__FLOW_NAME"] = "plain"
    without_prefect()
    from flows.config import read_pipeline_config
    from flows.pipeline import pipeline_flow

    Path(home).mkdir(parents=True, exist_ok=True)
    pipeline_flow(read_pipeline_config(Settings.from_environment().feature_repo))


if __name__ == "__main__":
    main(sys.argv[1])
