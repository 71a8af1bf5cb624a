"""Validated rows as model inputs: test rows, calibration rows, and rows that data rarely holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import (
    CATEGORY_CODE_MASK,
    DatasetSchema,
    ValidatedDataset,
    category_code,
)
from tasks.conversion.inputs import SEED, ModelInputs
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore

EXTREME = np.float32(1e30)


def tabular_inputs(categorical: NDArray[np.int32], numeric: NDArray[np.float32]) -> ModelInputs:
    """The two raw arrays of a program that takes a table, same rows in the same order."""
    return ModelInputs({"categorical": categorical, "numeric": numeric})


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
) -> LabelledRows:
    """Rows of one window, or a seeded sample of them, in the order of the snapshot.

    Args:
        dataset: validated snapshot.
        columns: what the model takes; the snapshot must hold the same.
        window: the rows' event times lie in it.
        store: holds the snapshot.
        limit: at most so many rows; None for all.

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
    return _labelled(_sample(table, limit), columns)


def _sample(table: pa.Table, limit: int | None) -> pa.Table:
    if limit is None or limit >= table.num_rows:
        return table
    chosen = np.random.default_rng(SEED).choice(table.num_rows, size=limit, replace=False)
    return table.take(np.sort(chosen))


def _labelled(table: pa.Table, columns: DatasetSchema) -> LabelledRows:
    frame = table.to_pandas()
    times = frame[columns.event_time].dt.tz_convert(None).to_numpy()
    labels = frame[columns.label]
    is_number = columns.task == "regression"
    return LabelledRows(
        inputs=tabular_inputs(*columns.model_inputs(frame)),
        labels=labels.to_numpy(np.float64) if is_number else labels.to_numpy() == 1,
        days=times.astype("datetime64[D]"),
    )


def edge_rows(typical: ModelInputs, num_rows: int) -> ModelInputs:
    """Rows that data rarely holds: all missing, all unknown, extreme, and random mixtures of these.

    Args:
        typical: ordinary rows to mix with.
        num_rows: how many.
    """
    rng = np.random.default_rng(SEED)
    rows = typical.repeated(num_rows)
    categorical, numeric = rows["categorical"], rows["numeric"]
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
    return tabular_inputs(categorical, numeric)


def read_categories(
    dataset: ValidatedDataset, columns: DatasetSchema, store: ArtifactStore
) -> tuple[NDArray[np.int32], ...]:
    """For each categorical column the codes of all its values in the whole snapshot, ascending.

    Raises:
        ArtifactError: the snapshot is absent or damaged.
    """
    table = pq.read_table(
        store.path(dataset.snapshot.data), columns=list(dict.fromkeys(columns.categorical))
    )
    return tuple(_codes(table[name].unique().to_pylist()) for name in columns.categorical)


def _codes(values: list[object]) -> NDArray[np.int32]:
    known = {category_code(None if value is None else str(value)) for value in values}
    return np.array(sorted(known), dtype=np.int32)


def category_rows(typical: ModelInputs, codes: tuple[NDArray[np.int32], ...]) -> ModelInputs:
    """Ordinary rows in which every value of every category occurs: test rows may lack rare ones.

    Args:
        typical: ordinary rows.
        codes: of each categorical column, at least one.
    """
    rows = typical.repeated(max([len(column) for column in codes], default=1))
    for position, column in enumerate(codes):
        rows["categorical"][:, position] = np.resize(column, rows.num_rows)
    return rows


def magnitude_rows(typical: ModelInputs, num_rows: int) -> ModelInputs:
    """Ordinary rows, some of whose numbers are far smaller or larger than they use to be.

    From a thousandth to a million times as large, of either sign: a form whose numbers overflow, or
    are rounded to fewer digits than the program's, answers otherwise here.

    Args:
        typical: ordinary rows.
        num_rows: how many.
    """
    rng = np.random.default_rng(SEED)
    rows = typical.repeated(num_rows)
    numeric = rows["numeric"]
    factors = 10.0 ** rng.uniform(-3, 6, numeric.shape) * rng.choice([-1, 1], numeric.shape)
    chosen = rng.random(numeric.shape) < 0.25
    numeric[chosen] = (numeric * factors)[chosen]
    return rows
