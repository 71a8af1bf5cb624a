"""Snapshots in files, ranks as threads that read them, and batches that are equal."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tasks.training.config import ReadingConfig, TrainingConfig
from tasks.training.core.objective import StepPlan
from tasks.training.core.run_directory import RunDirectory, TrainingJob
from tasks.training.data.decode import SnapshotFile
from tasks.training.data.opening import Sources, open_sources
from tasks.training.data.preprocess import Preprocessing
from tasks.training.data.source import Shuffle
from tasks.training.strategies.base import Batch
from tests.support.data.builders import COLUMNS, frame, splits
from tests.support.training.thread_ranks import ThreadCommunicator, on_threads

NUM_SHARDS = 5
PLAN = StepPlan(rows_per_shard=8, num_steps=16)
SHUFFLE = Shuffle(seed=3, pool_rows=50, piece_rows=7)


def preprocessing() -> Preprocessing:
    codes, _ = COLUMNS.model_inputs(frame(200))
    vocabularies = tuple(np.unique(column)[1:] for column in codes.T)
    return Preprocessing(vocabularies, (np.empty(0, np.float32),) * len(COLUMNS.numeric), ())


def write(
    folder: Path, rows: pd.DataFrame, row_group_size: int = 60, num_shards: int = NUM_SHARDS
) -> SnapshotFile:
    path = folder / "data.parquet"
    rows.to_parquet(path, row_group_size=row_group_size, index=False)
    return SnapshotFile(path, COLUMNS, num_shards)


def assert_equal(one: Batch, other: Batch) -> None:
    for a, b in zip((*one.inputs, one.labels), (*other.inputs, other.labels), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def job(
    folder: Path, rows: pd.DataFrame | None = None, num_shards: int = 4, **reading: object
) -> TrainingJob:
    path = folder / "data.parquet"
    if rows is not None or not path.exists():
        write(folder, frame(1600) if rows is None else rows, 100)
    config = TrainingConfig(
        num_shards=num_shards,
        global_batch_size=8 * num_shards,
        min_category_rows=5,
        num_bins=4,
        reading=ReadingConfig.model_validate(reading),
    )
    return training_job(snapshot_path=path, config=config)


def training_job(**changes: Any) -> TrainingJob:
    """What ranks are asked to do with rows of the builders."""
    fields = {"snapshot_path": Path("none"), "config": TrainingConfig(), **changes}
    return TrainingJob(**{"columns": COLUMNS, "splits": splits(), **fields})


def opened(work: TrainingJob, folder: Path, size: int) -> list[Sources]:
    def open_rank(ranks: ThreadCommunicator) -> Sources:
        return open_sources(work, ranks, RunDirectory(folder), lambda: None)

    return on_threads(size, open_rank)
