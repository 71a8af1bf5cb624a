"""Rows of a snapshot, one window at a time, a bounded number in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.evaluation.config import MONTH, EvaluationConfig
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore

SCORE, BASELINE_MODEL_SCORE = "score", "yardstick_score"


def read_batches(
    dataset: ValidatedDataset,
    window: TimeWindow,
    columns: Sequence[str],
    store: ArtifactStore,
    batch_rows: int,
) -> Iterator[pd.DataFrame]:
    """Rows of one window in the order of the snapshot, at most `batch_rows` at a time.

    Raises:
        DataContractError: the snapshot lacks a column.
        ArtifactError: the snapshot is absent or damaged.
    """
    snapshot = dataset.snapshot
    data = ds.dataset(store.path(snapshot.data), format="parquet")
    absent = [name for name in columns if name not in data.schema.names]
    if absent:
        raise DataContractError(
            f"snapshot {snapshot.data.sha256[:12]} lacks column(s) {', '.join(absent)}; it has "
            f"{len(data.schema.names)} columns. Use a snapshot of the model's own feature service"
        )
    time = ds.field(snapshot.columns.event_time)
    scanner = data.scanner(
        columns=list(dict.fromkeys(columns)),
        filter=(time >= window.start) & (time < window.end),
        batch_size=batch_rows,
        batch_readahead=2,
    )
    for batch in scanner.to_batches():
        if batch.num_rows:
            yield batch.to_pandas()


def input_columns(columns: DatasetSchema) -> tuple[str, ...]:
    """Names of all columns that a model takes."""
    return (*columns.categorical, *columns.numeric)


def slice_columns(columns: DatasetSchema, config: EvaluationConfig) -> tuple[str, ...]:
    """Columns that the slices need from the snapshot.

    Raises:
        ConfigurationError: a slice names no column of the snapshot.
    """
    wanted = tuple(name for name in config.slices if name != MONTH)
    known = {*columns.categorical, *columns.numeric}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigurationError(
            f"slices name {', '.join(unknown)}, which the snapshot does not have as feature(s); "
            f"expected `{MONTH}` or one of {', '.join(columns.categorical)}. Change `slices`"
        )
    return wanted


def utc_times(frame: pd.DataFrame, column: str) -> NDArray[np.datetime64]:
    """Event times as UTC without a zone, shape (rows,)."""
    times: NDArray[np.datetime64] = (
        frame[column].dt.tz_convert("UTC").dt.tz_localize(None).to_numpy()
    )
    return times


def joined(
    parts: Iterable[pd.DataFrame], dataset: ValidatedDataset, window: TimeWindow
) -> pd.DataFrame:
    """All parts in one frame.

    Raises:
        DataContractError: there is no row.
    """
    frames = list(parts)
    if not frames:
        raise DataContractError(
            f"snapshot {dataset.snapshot.data.sha256[:12]} ({dataset.snapshot.window}) has no row "
            f"in {window}; expected some. Choose a window with rows"
        )
    return pd.concat(frames, ignore_index=True)
