"""Rows that another room scored: reading them, and fitting a map to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.calibration import FitOutcome
from tasks.contracts.data import DatasetSchema
from tasks.contracts.evaluation import ScoredWindow
from tasks.evaluation.calibration.config import RecalibrationConfig
from tasks.evaluation.calibration.fit import fit_map
from tasks.kernel.settings import ArtifactStore

SCORE = "score"


def fit_scored(
    scored: ScoredWindow, columns: DatasetSchema, config: RecalibrationConfig, store: ArtifactStore
) -> FitOutcome:
    """Fit a map to the labelled rows of a scored window.

    Raises:
        ArtifactError: the scores are absent or damaged.
    """
    rows: pd.DataFrame = pq.read_table(store.path(scored.scores)).to_pandas()
    rows = rows[rows[columns.label].notna()]
    return fit_map(
        rows[columns.label].to_numpy(np.float64),
        rows[SCORE].to_numpy(),
        numbered_days(rows, columns),
        scored.window,
        config,
        is_number=columns.task == "regression",
    )


def numbered_days(rows: pd.DataFrame, columns: DatasetSchema) -> NDArray[np.intp]:
    """Number of each row's UTC day among the days that have rows, shape (rows,)."""
    times: NDArray[Any] = rows[columns.event_time].dt.tz_convert(None).to_numpy()
    numbers: NDArray[np.intp] = np.unique(times.astype("datetime64[D]"), return_inverse=True)[1]
    return numbers
