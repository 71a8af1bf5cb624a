"""The answers of a teacher, put beside the rows that a network is trained on.

They are the teacher's scores of the training window, computed once with its exported program and
kept in the artifact store by their content. Asking the teacher in the loop instead would cost its
forward pass in every epoch, its memory on every rank, and a preprocessing equal to the student's;
as a column they cost four bytes a row, and the loop, its checkpoints, the strategies and elastic
ranks need not know of them. Row groups stay as they are, so each step has the rows that it would
have without a teacher.

A smaller network before and after its training, and which of two twins is offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.data import DatasetSchema, DataSplits, ValidatedDataset
from tasks.contracts.evaluation import ScoredWindow
from tasks.contracts.training import (
    CompressedModel,
    DistillationTargets,
    ModelCompression,
    StartingPoint,
    TrainedModel,
)
from tasks.kernel.errors import DataContractError, refused_writes_explained
from tasks.kernel.settings import ArtifactStore
from tasks.training.compression.config import ShrinkingConfig
from tasks.training.config import TrainingConfig
from tasks.training.data.decode import ANSWER
from tasks.training.data.preprocess import Float32Array

SCORE = "score"
# A teacher that is certain has no finite logit; float32 holds no probability nearer to 1.
SMALLEST_PROBABILITY = 1e-7


def write_taught(
    source: Path,
    target: Path,
    dataset: ValidatedDataset,
    splits: DataSplits,
    lesson: DistillationTargets,
    store: ArtifactStore,
) -> str:
    """Write the rows with the teacher's answers, a row group at a time; says so in a sentence.

    Args:
        source: the rows, Parquet: the snapshot, or what a replay left of it.
        target: file to write; rows outside the training window have no answer.
        dataset: the validated snapshot.
        splits: which rows are for training.
        lesson: the teacher's scores.
        store: holds them.

    Raises:
        DataContractError: the scores are of other rows, or a training row has none.
        ArtifactError: the scores are absent or damaged.
        StorageError: the disk refused the write.
    """
    answers, columns = _answers(dataset, splits.train, lesson, store), dataset.snapshot.columns
    num_rows = 0
    with pq.ParquetFile(source) as rows:
        schema = rows.schema_arrow.append(pa.field(ANSWER, pa.float32()))
        with refused_writes_explained(target), pq.ParquetWriter(target, schema) as out:
            for group in range(rows.num_row_groups):
                table = rows.read_row_group(group)
                column = _column_for(table, columns, splits.train, answers)
                num_rows += len(column) - column.null_count
                with_answers = table.append_column(schema.field(ANSWER), column)
                out.write_table(with_answers, row_group_size=max(1, table.num_rows))
    return (
        f"a teacher's answers for {num_rows:,} training rows have weight {lesson.weight:g} in the "
        f"loss, temperature {lesson.temperature:g}"
    )


def _answers(
    dataset: ValidatedDataset, train: TimeWindow, lesson: DistillationTargets, store: ArtifactStore
) -> pa.Table:
    """Row ids and answers of all rows that the teacher scored, in the order of the snapshot."""
    columns, given = dataset.snapshot.columns, lesson.answers
    if given.snapshot_sha256 != dataset.snapshot.data.sha256 or not given.window.contains(train):
        raise DataContractError(
            f"the teacher answered for {given.window} of snapshot {given.snapshot_sha256[:12]}, "
            f"the training is on {train} of {dataset.snapshot.data.sha256[:12]}; score the "
            "training window of the same snapshot. Nothing was trained"
        )
    table = pq.read_table(store.path(given.scores), columns=[columns.row_id, SCORE])
    scores = table[SCORE].to_numpy().astype(np.float32)
    if columns.task == "classification":
        scores = logits_of(scores)
    answers = table.select([columns.row_id])
    return answers.append_column(ANSWER, pa.array(scores))


def logits_of(probabilities: Float32Array) -> Float32Array:
    """Logits of probabilities; those of 0 and 1 are the largest that float32 tells from them."""
    wide = np.clip(probabilities.astype(np.float64), SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    logits: Float32Array = np.log(wide / (1 - wide)).astype(np.float32)
    return logits


def _column_for(
    table: pa.Table, columns: DatasetSchema, train: TimeWindow, answers: pa.Table
) -> pa.ChunkedArray:
    """The answers of a row group's rows, by row id; null outside the training window."""
    places = pc.index_in(table[columns.row_id], value_set=answers[columns.row_id])
    found = answers[ANSWER].take(places.combine_chunks())
    times = table[columns.event_time]
    inside = pc.and_(pc.greater_equal(times, train.start), pc.less(times, train.end))
    column = pc.if_else(pc.fill_null(inside, False), found, pa.scalar(None, pa.float32()))
    num_bare = int(pc.sum(pc.fill_null(inside, False)).as_py() or 0) - (
        len(column) - column.null_count
    )
    if num_bare:
        raise DataContractError(
            f"the teacher has no answer for {num_bare} of the training rows in {train}; expected "
            "one for each. Score the training window again. Nothing was trained"
        )
    return column


class StudentPlan(Contract):
    """A smaller network before it is trained."""

    shrinking: ModelCompression
    config: TrainingConfig
    initial: StartingPoint | None
    """What pruning left; None for a network that begins from scratch."""


def lesson_of(answers: ScoredWindow, config: ShrinkingConfig) -> DistillationTargets:
    """The parent's answers as a lesson."""
    return DistillationTargets(
        answers=answers, weight=config.teacher_weight, temperature=config.temperature
    )


@dataclass(frozen=True)
class Choice:
    """The network that is offered, and why that one."""

    model: CompressedModel
    reason: str


def chosen(
    shrinking: ModelCompression, taught: TrainedModel | None, untaught: TrainedModel
) -> Choice:
    """The better of the taught network and its twin, by the validation rows.

    Not by the test rows: those judge what was chosen. Where both are as good, the simpler way.

    Args:
        shrinking: how they were made.
        taught: learnt from labels and the parent's answers; None where nobody taught.
        untaught: the same from labels alone.
    """
    if taught is None:
        return Choice(_shrunk(untaught, shrinking, is_taught=False), "there was no teacher")
    ours, alone = (model.epochs[model.best_epoch] for model in (taught, untaught))
    is_better = ours.quality > alone.quality
    told = (
        f"on the validation rows the taught network has {ours.quality_name} {ours.quality:.4f}, "
        f"the one without a teacher {alone.quality:.4f}; the "
        f"{'taught one' if is_better else 'one without'} is offered"
    )
    return Choice(_shrunk(taught if is_better else untaught, shrinking, is_taught=is_better), told)


def _shrunk(
    model: TrainedModel, shrinking: ModelCompression, *, is_taught: bool
) -> CompressedModel:
    made = shrinking.model_copy(update={"is_taught": is_taught})
    return CompressedModel.model_validate({**model.model_dump(), "shrinking": made.model_dump()})
