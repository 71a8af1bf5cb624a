"""Programs that take a table's raw columns and give one score a row: a probability or a number."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.conversion import ConversionRows, SnapshotRows
from tasks.contracts.data import AUC_NAME, R2_NAME, TaskKind
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.inputs import Batches, ModelInputs, Scores
from tasks.conversion.kinds.interface import JudgedRows, ModelKind, Wording
from tasks.conversion.kinds.quality import paired_change
from tasks.conversion.kinds.tabular_rows import (
    category_rows,
    edge_rows,
    magnitude_rows,
    read_categories,
    read_rows,
)
from tasks.kernel.errors import ConfigurationError, ConversionError, DataContractError
from tasks.kernel.settings import ArtifactStore

BLOCK_ROWS = 8192
EDGE_BATCH_SIZES = (1, 2, 7, 1024)
# NNCF averages the ranges of batches. Ranges of single rows are too narrow: on real flights the
# largest gap was 0.16 with batches of 1, 0.03 of 64, 0.01 of 512 and of all 2000 rows at once.
CALIBRATION_BATCH_ROWS = 512
FAR = 10.0

WORDING: dict[TaskKind, Wording] = {
    "classification": Wording("a probability", "probabilities", "", AUC_NAME),
    "regression": Wording("a prediction", "predictions", " standard deviations", R2_NAME),
}
BOUNDS = {
    "fp32": QualityBound(max_gap=1e-4, mean_gap=1e-5, quality_drop=1e-4),
    "fp16": QualityBound(max_gap=0.005, mean_gap=0.0005, quality_drop=0.0005),
    "bf16": QualityBound(max_gap=0.02, mean_gap=0.002, quality_drop=0.001),
    "weights-int8": QualityBound(max_gap=0.05, mean_gap=0.005, quality_drop=0.001),
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


def _read_calibration(
    program: RegisteredProgram,
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> Batches:
    source = _snapshot(rows)
    try:
        read = read_rows(
            source.dataset,
            program.raw_columns,
            source.splits.train,
            store,
            limit=config.calibration_rows,
        )
    except DataContractError as exc:
        raise ConversionError(f"there is nothing to calibrate INT8 on: {exc}") from exc
    return tuple(read.inputs.blocks(CALIBRATION_BATCH_ROWS))


def _read_judged(
    program: RegisteredProgram,
    rows: ConversionRows,
    config: ConversionConfig,
    store: ArtifactStore,
) -> JudgedRows:
    source, columns = _snapshot(rows), program.raw_columns
    read = read_rows(source.dataset, columns, source.splits.test, store)
    is_number = columns.task == "regression"
    unit, centre = (float(read.labels.std()), float(read.labels.mean())) if is_number else (1, None)
    edges = edge_rows(read.inputs, max(EDGE_BATCH_SIZES))
    codes = read_categories(source.dataset, columns, store)
    return JudgedRows(
        batches=tuple(read.inputs.blocks(BLOCK_ROWS)),
        edges=(
            *edge_batches(edges),
            *category_rows(read.inputs, codes).blocks(BLOCK_ROWS),
            magnitude_rows(read.inputs, max(EDGE_BATCH_SIZES)),
        ),
        distances=partial(score_distances, unit=unit, centre=centre),
        change=paired_change(columns.task, read),
        timing_batch=read.inputs.repeated,
        wording=WORDING[columns.task],
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
