"""Quality of scores that were served, where their labels are known by now."""

from __future__ import annotations

import pandas as pd

from tasks.contracts.evaluation import ScoredWindow
from tasks.contracts.predictions import ServedWindow
from tasks.evaluation.bootstrap import Measured
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.measuring import measure_rows, why_not_judged
from tasks.evaluation.rows import SCORE
from tasks.kernel.settings import ArtifactStore


def judge_served(
    served: ServedWindow, config: EvaluationConfig, store: ArtifactStore
) -> ScoredWindow:
    """The scores that were served, as `score_window` gives those that it makes; none is made here.

    Raises:
        ArtifactError: an artifact is absent or damaged.
    """
    snapshot = served.dataset.snapshot
    columns = snapshot.columns
    rows = pd.read_parquet(store.path(served.scores))
    labelled = rows[rows[columns.label].notna()]
    unjudged = why_not_judged(labelled, columns, config)
    measured = None if unjudged else measure_rows(labelled, columns, SCORE, config)
    return ScoredWindow(
        program_sha256=served.program_sha256,
        snapshot_sha256=snapshot.data.sha256,
        window=snapshot.window,
        num_rows=len(rows),
        scores=served.scores,
        metrics=measured.metric_set() if measured else None,
        excess_brier=measured.metric("excess_brier") if isinstance(measured, Measured) else None,
        unjudged=unjudged,
    )
