"""A snapshot's file with its shards, how its rows are shuffled, and batches that are equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tasks.training.core.schedule import StepPlan
from tasks.training.data.decode import SnapshotFile
from tasks.training.data.preprocess import Preprocessing
from tasks.training.data.source import Shuffle
from tasks.training.strategies.base import Batch
from tests.support.data.builders import COLUMNS, frame

NUM_SHARDS = 5
PLAN = StepPlan(rows_per_shard=8, num_steps=16)
SHUFFLE = Shuffle(seed=3, pool_rows=50, piece_rows=7, plan=PLAN)


def preprocessing() -> Preprocessing:
    codes, _ = COLUMNS.model_inputs(frame(200))
    vocabularies = tuple(np.unique(column)[1:] for column in codes.T)
    return Preprocessing(vocabularies, (np.empty(0, np.float32),) * len(COLUMNS.numeric), ())


def write(folder: Path, rows: pd.DataFrame, row_group_size: int = 60) -> SnapshotFile:
    path = folder / "data.parquet"
    rows.to_parquet(path, row_group_size=row_group_size, index=False)
    return SnapshotFile(path, COLUMNS, NUM_SHARDS)


def assert_equal(one: Batch, other: Batch) -> None:
    for a, b in zip((*one.inputs, one.labels), (*other.inputs, other.labels), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
