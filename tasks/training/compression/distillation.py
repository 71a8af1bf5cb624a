"""Distillation: a teacher's outputs beside the rows that a network is trained on, and its control.

They are the teacher's scores of the training window, computed once with its exported program and
kept in the artifact store by their content. Asking the teacher in the loop instead would cost its
forward pass in every epoch, its memory on every rank, and a preprocessing equal to the student's;
as a column they cost four bytes a row, and the loop, its checkpoints, the strategies and elastic
ranks need not know of them. Row groups stay as they are, so each step has the rows that it would
have without a teacher.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.contracts.data import DatasetSchema, DataSplits, ValidatedDataset
from tasks.contracts.training import (
    CompressedModel,
    DistillationTargets,
    ModelCompression,
    TrainedModel,
)
from tasks.kernel.errors import DataContractError, refused_writes_explained
from tasks.kernel.settings import ArtifactStore
from tasks.training.data.decode import TEACHER_OUTPUT
from tasks.training.data.preprocess import Float32Array

SCORE = "score"
# A teacher that is certain has no finite logit; float32 holds no probability nearer to 1.
SMALLEST_PROBABILITY = 1e-7


def write_distillation_targets(
    source: Path,
    target: Path,
    dataset: ValidatedDataset,
    splits: DataSplits,
    distillation: DistillationTargets,
    store: ArtifactStore,
) -> str:
    """Write the rows with the teacher's outputs, a row group at a time; returns a line about it.

    Args:
        source: the rows, Parquet: the snapshot, or what a replay left of it.
        target: file to write; rows outside the training window have no output.
        dataset: the validated snapshot.
        splits: which rows are for training.
        distillation: the teacher's scores.
        store: holds them.

    Raises:
        DataContractError: the scores are of other rows, or a training row has none.
        ArtifactError: the scores are absent or damaged.
        StorageError: the disk refused the write.
    """
    columns, num_rows = dataset.snapshot.columns, 0
    outputs = _outputs(dataset, splits, distillation, store)
    with pq.ParquetFile(source) as rows:
        schema = rows.schema_arrow.append(pa.field(TEACHER_OUTPUT, pa.float32()))
        with refused_writes_explained(target), pq.ParquetWriter(target, schema) as out:
            for group in range(rows.num_row_groups):
                table = rows.read_row_group(group)
                column = _column_for(table, columns, splits, outputs)
                num_rows += len(column) - column.null_count
                wider = table.append_column(schema.field(TEACHER_OUTPUT), column)
                out.write_table(wider, row_group_size=max(1, table.num_rows))
    return (
        f"a teacher's outputs for {num_rows:,} training rows have weight "
        f"{distillation.weight:g} in the loss, temperature {distillation.temperature:g}"
    )


def _outputs(
    dataset: ValidatedDataset,
    splits: DataSplits,
    distillation: DistillationTargets,
    store: ArtifactStore,
) -> pa.Table:
    """Row ids and outputs of all rows that the teacher scored, in the order of the snapshot."""
    columns, given = dataset.snapshot.columns, distillation.scores
    sha256 = dataset.snapshot.data.sha256
    if given.snapshot_sha256 != sha256 or not given.window.contains(splits.train):
        raise DataContractError(
            f"the teacher scored {given.window} of snapshot {given.snapshot_sha256[:12]}, the "
            f"training is on {splits.train} of {sha256[:12]}; score the training window of the "
            "same snapshot. Nothing was trained"
        )
    table = pq.read_table(store.path(given.scores), columns=[columns.row_id, SCORE])
    scores = table[SCORE].to_numpy().astype(np.float32)
    if columns.task == "classification":
        scores = logits_of(scores)
    return table.select([columns.row_id]).append_column(TEACHER_OUTPUT, pa.array(scores))


def logits_of(probabilities: Float32Array) -> Float32Array:
    """Logits of probabilities; those of 0 and 1 are the largest that float32 tells from them."""
    wide = np.clip(probabilities.astype(np.float64), SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    logits: Float32Array = np.log(wide / (1 - wide)).astype(np.float32)
    return logits


def _column_for(
    table: pa.Table, columns: DatasetSchema, splits: DataSplits, outputs: pa.Table
) -> pa.ChunkedArray:
    """The outputs of a row group's rows, by row id; null outside the training window."""
    places = pc.index_in(table[columns.row_id], value_set=outputs[columns.row_id])
    found = outputs[TEACHER_OUTPUT].take(places.combine_chunks())
    times, train = table[columns.event_time], splits.train
    inside = pc.and_(pc.greater_equal(times, train.start), pc.less(times, train.end))
    inside = pc.fill_null(inside, False)
    column = pc.if_else(inside, found, pa.scalar(None, pa.float32()))
    num_bare = int(pc.sum(inside).as_py() or 0) - (len(column) - column.null_count)
    if num_bare:
        raise DataContractError(
            f"the teacher has no score for {num_bare} of the training rows in {train}; expected "
            "one for each. Score the training window again. Nothing was trained"
        )
    return column


class Choice(NamedTuple):
    """The network that is offered, and why that one."""

    model: CompressedModel
    reason: str


def chosen(
    compression: ModelCompression, distilled: TrainedModel | None, control: TrainedModel
) -> Choice:
    """The better of the distilled network and its control run, by the validation rows.

    Not by the test rows: those judge what was chosen. Where both are as good, the simpler way.

    Args:
        compression: how they were made.
        distilled: learnt from labels and the parent's scores; None where there was no teacher.
        control: the same from labels alone.
    """
    model, is_distilled, reason = control, False, "there was no teacher"
    if distilled is not None:
        ours, theirs = (model.epochs[model.best_epoch] for model in (distilled, control))
        is_distilled = ours.quality > theirs.quality
        model = distilled if is_distilled else control
        reason = (
            f"on the validation rows the distilled network has {ours.quality_name} "
            f"{ours.quality:.4f}, the control run {theirs.quality:.4f}; the "
            f"{'distilled network' if is_distilled else 'control run'} is offered"
        )
    made = compression.model_copy(update={"is_distilled": is_distilled})
    content = {**model.model_dump(), "compression": made.model_dump()}
    return Choice(CompressedModel.model_validate(content), reason)
