"""Programs that take a table's raw columns and give a score a row, or one for each class."""

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts import data
from tasks.contracts.base import TimeWindow
from tasks.contracts.conversion import ConversionRows, SnapshotRows
from tasks.conversion.config import QualityBound
from tasks.conversion.kinds.interface import JudgedRows, LabelledRows, ModelKind, paired_change
from tasks.conversion.targets.interface import SEED, Batches, ConversionJob, ModelInputs, Scores
from tasks.kernel.errors import ConfigurationError, ConversionError, DataContractError
from tasks.kernel.settings import ArtifactStore

EXTREME = np.float32(1e30)


def tabular_inputs(categorical: NDArray[np.int32], numeric: NDArray[np.float32]) -> ModelInputs:
    """The two raw arrays of a program that takes a table, same rows in the same order."""
    return ModelInputs({"categorical": categorical, "numeric": numeric})


def read_rows(
    dataset: data.ValidatedDataset,
    columns: data.DatasetSchema,
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


def _labelled(table: pa.Table, columns: data.DatasetSchema) -> LabelledRows:
    frame = table.to_pandas()
    times = frame[columns.event_time].dt.tz_convert(None).to_numpy()
    labels = frame[columns.label]
    is_binary = columns.task == "classification"
    return LabelledRows(
        inputs=tabular_inputs(*columns.model_inputs(frame)),
        labels=labels.to_numpy() == 1 if is_binary else labels.to_numpy(np.float64),
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
    unknown = rng.integers(1, data.CATEGORY_CODE_MASK, categorical.shape, dtype=np.int32)
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


def category_rows(
    typical: ModelInputs,
    dataset: data.ValidatedDataset,
    columns: data.DatasetSchema,
    store: ArtifactStore,
) -> ModelInputs:
    """Ordinary rows in which every category of the snapshot occurs: test rows may lack rare ones.

    Raises:
        ArtifactError: the snapshot is absent or damaged.
    """
    names = columns.categorical
    table = pq.read_table(store.path(dataset.snapshot.data), columns=list(dict.fromkeys(names)))
    codes = []
    for name in names:
        values = table[name].unique().to_pylist()
        codes.append(sorted({data.category_code(None if v is None else str(v)) for v in values}))
    rows = typical.repeated(max(map(len, codes), default=1))
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


BLOCK_ROWS = 8192
EDGE_BATCH_SIZES = (1, 2, 7, 1024)
# NNCF averages the ranges of batches. Ranges of single rows are too narrow: on real flights the
# largest gap was 0.16 with batches of 1, 0.03 of 64, 0.01 of 512 and of all 2000 rows at once.
CALIBRATION_BATCH_ROWS = 512
FAR = 10.0

UNIT = " standard deviations"
BOUNDS = {
    "fp32": QualityBound(max_gap=1e-4, mean_gap=1e-5, quality_drop=1e-4),
    "fp16": QualityBound(max_gap=0.005, mean_gap=0.0005, quality_drop=0.0005),
    "bf16": QualityBound(max_gap=0.02, mean_gap=0.002, quality_drop=0.001),
    "int8": QualityBound(max_gap=0.05, mean_gap=0.005, quality_drop=0.001),
}


def score_distances(
    reference: Scores, converted: Scores, unit: float = 1.0, centre: float | None = None
) -> NDArray[np.float64]:
    """Gaps of scores, in units of `unit`: 1 for probabilities, a standard deviation for numbers.

    Args:
        reference: scores of the source.
        converted: scores of the same rows by a variant of it.
        unit: what a gap of 1 is.
        centre: where numbers usually lie; None for probabilities. Farther from it than `FAR` units
            a gap counts in parts of that distance: 32-bit floats hold no more than 7 digits.
    """
    exact = reference.astype(np.float64)
    gaps: NDArray[np.float64] = np.abs(exact - converted)
    if gaps.ndim > 1:  # probabilities of several classes
        gaps = gaps.max(axis=1)
    if centre is None:
        return gaps / unit
    return gaps / np.maximum(unit, np.abs(exact - centre) / FAR)


def edge_batches(edges: ModelInputs) -> Batches:
    """Edge rows in calls of 1, 2, 7 and 1024, from the beginning, nearly so, and from the end."""
    return tuple(
        edges.block(start, start + rows)
        for rows in EDGE_BATCH_SIZES
        for start in sorted({0, min(1, edges.num_rows - rows), edges.num_rows - rows})
    )


def _read_calibration(job: ConversionJob) -> Batches:
    rows, columns = _snapshot(job.rows), job.program.raw_columns
    try:
        limit = job.config.calibration_rows
        read = read_rows(rows.dataset, columns, rows.splits.train, job.store, limit=limit)
    except DataContractError as exc:
        raise ConversionError(f"there is nothing to calibrate INT8 on: {exc}") from exc
    return tuple(read.inputs.blocks(CALIBRATION_BATCH_ROWS))


def _read_judged(job: ConversionJob) -> JudgedRows:
    rows, columns = _snapshot(job.rows), job.program.raw_columns
    read = read_rows(rows.dataset, columns, rows.splits.test, job.store)
    is_number = columns.task == "regression"
    unit, centre = (float(read.labels.std()), float(read.labels.mean())) if is_number else (1, None)
    return JudgedRows(
        batches=tuple(read.inputs.blocks(BLOCK_ROWS)),
        edges=(
            *edge_batches(edge_rows(read.inputs, max(EDGE_BATCH_SIZES))),
            *category_rows(read.inputs, rows.dataset, columns, job.store).blocks(BLOCK_ROWS),
            magnitude_rows(read.inputs, max(EDGE_BATCH_SIZES)),
        ),
        distances=partial(score_distances, unit=unit, centre=centre),
        change=paired_change(columns.task, read),
        timing_batch=read.inputs.repeated,
        metric=data.R2_NAME if is_number else data.AUC_NAME,
        unit=UNIT if is_number else "",
    )


def _snapshot(rows: ConversionRows) -> SnapshotRows:
    if not isinstance(rows, SnapshotRows):
        raise ConfigurationError(
            "a tabular program is converted with the rows of a validated snapshot, and got rows "
            f"that are {rows.kind}; hand it the snapshot it was trained on, or import a program "
            "that comes with rows of its own as one of the kind 'tensors'"
        )
    return rows


TABULAR = ModelKind(
    name="tabular", bounds=BOUNDS, read_calibration=_read_calibration, read_judged=_read_judged
)
