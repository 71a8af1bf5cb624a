"""Validated rows as model inputs: test rows, calibration rows, and rows that data rarely holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import CATEGORY_CODE_MASK, DatasetSchema, ValidatedDataset
from tasks.errors import DataContractError
from tasks.settings import ArtifactStore

BLOCK_ROWS = 8192
EXTREME = np.float32(1e30)


@dataclass(frozen=True)
class ModelInputs:
    """The two raw arrays of every model format, same rows in the same order."""

    categorical: NDArray[np.int32]
    numeric: NDArray[np.float32]

    @property
    def num_rows(self) -> int:
        """Rows of both arrays."""
        return len(self.numeric)

    def block(self, start: int, end: int) -> ModelInputs:
        """Rows `start` to before `end`, or fewer where there are not so many."""
        return ModelInputs(self.categorical[start:end], self.numeric[start:end])

    def blocks(self, rows: int = BLOCK_ROWS) -> Iterator[ModelInputs]:
        """All rows, `rows` at a time."""
        for start in range(0, self.num_rows, rows):
            yield self.block(start, start + rows)

    def repeated(self, rows: int) -> ModelInputs:
        """Exactly `rows` rows: the first ones, started over where there are not so many."""
        index = np.arange(rows) % self.num_rows
        return ModelInputs(self.categorical[index], self.numeric[index])


@dataclass(frozen=True)
class LabelledRows:
    """Model inputs with what is known about each row."""

    inputs: ModelInputs
    labels: NDArray[Any]
    """Whether the label is 1, bool; for a regression the label, float64."""
    days: NDArray[np.datetime64]


def read_rows(
    dataset: ValidatedDataset,
    columns: DatasetSchema,
    window: TimeWindow,
    store: ArtifactStore,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> LabelledRows:
    """Rows of one window, or a seeded sample of them, in the order of the snapshot.

    Args:
        dataset: validated snapshot.
        columns: what the model takes; the snapshot must hold the same.
        window: the rows' event times lie in it.
        store: holds the snapshot.
        limit: at most so many rows; None for all.
        seed: of the sample.

    Raises:
        DataContractError: the snapshot has other columns, or no row in the window.
        ArtifactError: the snapshot is absent or damaged.
    """
    snapshot = dataset.snapshot
    if snapshot.columns != columns:
        raise DataContractError(
            f"snapshot {snapshot.data.sha256[:12]} has other columns than the model takes; convert "
            "with the snapshot the model was trained on, or one of the same feature service"
        )
    table = pq.read_table(
        store.path(snapshot.data),
        columns=[columns.event_time, columns.label, *columns.categorical, *columns.numeric],
        filters=[(columns.event_time, ">=", window.start), (columns.event_time, "<", window.end)],
    )
    if table.num_rows == 0:
        raise DataContractError(
            f"snapshot {snapshot.data.sha256[:12]} ({snapshot.window}) has no row in {window}; "
            "choose a window with rows"
        )
    return _labelled(_sample(table, limit, seed), columns)


def _sample(table: pa.Table, limit: int | None, seed: int) -> pa.Table:
    if limit is None or limit >= table.num_rows:
        return table
    chosen = np.random.default_rng(seed).choice(table.num_rows, size=limit, replace=False)
    return table.take(np.sort(chosen))


def _labelled(table: pa.Table, columns: DatasetSchema) -> LabelledRows:
    frame = table.to_pandas()
    times = frame[columns.event_time].dt.tz_convert(None).to_numpy()
    labels = frame[columns.label]
    is_number = columns.task == "regression"
    return LabelledRows(
        inputs=ModelInputs(*columns.model_inputs(frame)),
        labels=labels.to_numpy(np.float64) if is_number else labels.to_numpy() == 1,
        days=times.astype("datetime64[D]"),
    )


def edge_rows(typical: ModelInputs, num_rows: int, seed: int) -> ModelInputs:
    """Rows that data rarely holds: all missing, all unknown, extreme, and random mixtures of these.

    Args:
        typical: ordinary rows to mix with.
        num_rows: how many.
        seed: of the mixture.
    """
    rng = np.random.default_rng(seed)
    rows = typical.repeated(num_rows)
    categorical, numeric = rows.categorical, rows.numeric
    unknown = rng.integers(1, CATEGORY_CODE_MASK, categorical.shape, dtype=np.int32)
    numeric[rng.random(numeric.shape) < 0.2] = np.nan
    numeric[rng.random(numeric.shape) < 0.05] = EXTREME
    numeric[rng.random(numeric.shape) < 0.05] = -EXTREME
    swapped = rng.random(categorical.shape) < 0.3
    categorical[swapped] = unknown[swapped]
    numeric[0::8], categorical[0::8] = np.nan, 0
    numeric[1::8] = EXTREME
    numeric[2::8] = -EXTREME
    numeric[3::8] = 0.0
    categorical[4::8] = unknown[4::8]
    return ModelInputs(categorical, numeric)
