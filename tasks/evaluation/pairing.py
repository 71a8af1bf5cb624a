"""Two models on the rows of one window: which of them errs less, for certain."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tasks.contracts.data import DatasetSchema
from tasks.contracts.evaluation import Comparison, ScoredWindow
from tasks.evaluation.bootstrap import Measured
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.measuring import measure_rows
from tasks.evaluation.regression import MeasuredNumbers
from tasks.evaluation.rows import SCORE
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore

AGAINST = "present champion"


def compare_scored(
    former: ScoredWindow,
    present: ScoredWindow,
    columns: DatasetSchema,
    config: EvaluationConfig,
    store: ArtifactStore,
) -> Comparison | None:
    """Former minus present model on the labelled rows, both on the same bootstrap draws.

    Args:
        former: scores of the one.
        present: scores of the other, of the same rows.
        columns: of the snapshot that both scored.
        config: bootstrap.
        store: holds the scores.

    Returns:
        The differences; None where labels are too few to judge.

    Raises:
        DataContractError: they are not of the same rows.
        ArtifactError: scores are absent or damaged.
    """
    if (former.snapshot_sha256, former.window) != (present.snapshot_sha256, present.window):
        raise DataContractError(
            f"one model scored {former.window} of snapshot {former.snapshot_sha256[:12]}, the other"
            f" {present.window} of {present.snapshot_sha256[:12]}; score the same rows first"
        )
    if former.metrics is None or present.metrics is None:
        return None
    one, other = (_rows(scored, store) for scored in (former, present))
    if not np.array_equal(one[columns.row_id].to_numpy(), other[columns.row_id].to_numpy()):
        raise DataContractError(
            f"two models scored {present.window}, and the ids of their rows differ; remove the "
            "stored scores and score the window again"
        )
    known = other[columns.label].notna()
    plain = columns.model_copy(update={"baseline": None})  # it is no part of what is compared
    ours, theirs = (measure_rows(rows[known], plain, SCORE, config) for rows in (one, other))
    if isinstance(ours, Measured) and isinstance(theirs, Measured):
        return ours.minus(theirs, AGAINST)
    if isinstance(ours, MeasuredNumbers) and isinstance(theirs, MeasuredNumbers):
        return ours.minus(theirs, AGAINST)
    return None


def _rows(scored: ScoredWindow, store: ArtifactStore) -> pd.DataFrame:
    rows: pd.DataFrame = pq.read_table(store.path(scored.scores)).to_pandas()
    return rows
