"""Snapshots written for one training: new rows and some older ones, or with a teacher's outputs.

Training on new rows without forgetting takes every row newer than the champion's training window,
and so many older ones that they are `share` of all. Which ones is a function of the row's id and
the seed, so it does not depend on the ranks, the order of the rows or the attempt. A share of 0
trains on new rows alone (and forgets), 1 is not offered: that is a training from all rows.

A teacher's outputs are its scores of the training window, computed once with its exported program
and kept in the artifact store by their content. Asking it in the loop instead would cost its
forward pass in every epoch, its memory on every rank, and a preprocessing equal to the student's;
as a column they cost four bytes a row, and nothing else need know of them. Row groups stay as they
are, so each step has the rows that it would have without a teacher.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.evaluation import ScoredWindow
from tasks.kernel.errors import DataContractError, WindowError, refused_writes_explained
from tasks.kernel.settings import ArtifactStore
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.data.decode import TEACHER_OUTPUT, inside
from tasks.training.data.preprocess import Float32Array


def new_rows_window(train: TimeWindow, champion: TimeWindow) -> TimeWindow:
    """The part of the training window that the champion was not trained on.

    Raises:
        WindowError: there is none, or the champion was trained on later rows than these.
    """
    if champion.end >= train.end:
        raise WindowError(
            f"the champion was trained on rows up to {champion.end:%FT%RZ}, the training window "
            f"{train} has none after that; nothing new is there to learn. Move the window on"
        )
    return TimeWindow(start=max(train.start, champion.end), end=train.end)


def replay_probability(num_new: int, num_old: int, share: float) -> float:
    """Probability with which an older row comes along.

    Args:
        num_new: rows newer than the champion's training window, over all ranks.
        num_old: older rows, over all ranks.
        share: of older rows among all rows that are trained on, in [0, 1).

    Returns:
        In [0, 1]; 1 where there are fewer older rows than the share asks for.
    """
    if not num_old:
        return 0.0
    return min(1.0, share / (1.0 - share) * num_new / num_old)


def replayed(row_ids: pa.ChunkedArray, probability: float, seed: int) -> NDArray[np.bool_]:
    """Which of the older rows come along, shape as `row_ids`: a hash of id and seed decides."""
    named = pc.binary_join_element_wise(row_ids.cast(pa.string()), str(seed), "/")
    texts = named.to_numpy(zero_copy_only=False)
    hashes = np.asarray(pd.util.hash_array(texts, categorize=False), dtype=np.uint64)
    return (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53 < probability


def write_replayed(snapshot: Path, target: Path, request: TrainingRequest) -> str:
    """Write the rows of a continued training, a row group at a time; returns a line about it.

    Args:
        snapshot: all rows, Parquet.
        target: file to write; takes the rows of the rule above, and all rows outside the training
            window as they are.
        request: whose `initial` has the champion's training window, and whose configuration the
            share of older rows and the seed that decides which of them come along.

    Raises:
        WindowError: nothing is new.
        StorageError: the disk refused the write.
    """
    assert request.initial is not None
    columns, splits, config = request.columns, request.splits, request.config
    share = config.replay_share or 0.0
    new = new_rows_window(splits.train, request.initial.trained_on)
    times = pq.read_table(snapshot, columns=[columns.event_time])[columns.event_time]
    num_new, num_all = (int(inside(times, window).sum()) for window in (new, splits.train))
    probability = replay_probability(num_new, num_all - num_new, share)
    num_old = 0

    def choose(table: pa.Table) -> pa.Table:
        nonlocal num_old
        times = table[columns.event_time]
        older = inside(times, splits.train) & ~inside(times, new)
        chosen = replayed(table[columns.row_id], probability, config.seed)
        num_old += int((older & chosen).sum())
        return table.filter(pa.array(~older | chosen))

    _rewrite(snapshot, target, (), choose)
    return (
        f"training continues the champion's with {num_new} rows of {new} and {num_old} of "
        f"{num_all - num_new} older ones (replay_share={share:g})"
    )


def _rewrite(
    source: Path, target: Path, more: Sequence[pa.Field], change: Callable[[pa.Table], pa.Table]
) -> None:
    """Write what `change` makes of each row group, with `more` columns; row groups stay."""
    with pq.ParquetFile(source) as rows:
        schema = pa.schema([*rows.schema_arrow, *more], rows.schema_arrow.metadata)
        with refused_writes_explained(target), pq.ParquetWriter(target, schema) as out:
            for group in range(rows.num_row_groups):
                table = change(rows.read_row_group(group))
                out.write_table(table, row_group_size=max(1, table.num_rows))


SCORE = "score"
# A teacher that is certain has no finite logit; float32 holds no probability nearer to 1.
SMALLEST_PROBABILITY = 1e-7


def write_distillation_targets(
    source: Path, target: Path, request: TrainingRequest, store: ArtifactStore
) -> str:
    """Write the rows with the teacher's outputs, a row group at a time; returns a line about it.

    Args:
        source: the rows, Parquet: the snapshot, or what a replay left of it.
        target: file to write; rows outside the training window have no output.
        request: its `distillation` names the teacher's scores.
        store: holds them.

    Raises:
        DataContractError: the scores are of other rows, or a training row has none.
        ArtifactError: the scores are absent or damaged.
        StorageError: the disk refused the write.
    """
    distillation, num_rows = request.distillation, 0
    assert distillation is not None
    outputs = _outputs(request, distillation.scores, store)
    field = pa.field(TEACHER_OUTPUT, pa.float32())

    def widen(table: pa.Table) -> pa.Table:
        """Outputs of a row group's rows, by row id; null outside the training window."""
        nonlocal num_rows
        columns, train = request.columns, request.splits.train
        places = pc.index_in(table[columns.row_id], value_set=outputs[columns.row_id])
        found = outputs[TEACHER_OUTPUT].take(places.combine_chunks())
        is_trained = pa.array(inside(table[columns.event_time], train))
        column = pc.if_else(is_trained, found, pa.scalar(None, pa.float32()))
        num_known = len(column) - column.null_count
        if num_bare := is_trained.true_count - num_known:
            raise DataContractError(
                f"the teacher has no score for {num_bare} of the training rows in {train}; "
                "expected one for each. Score the training window again. Nothing was trained"
            )
        num_rows += num_known
        return table.append_column(field, column)

    _rewrite(source, target, (field,), widen)
    return (
        f"a teacher's outputs for {num_rows:,} training rows have weight "
        f"{distillation.weight:g} in the loss, temperature {distillation.temperature:g}"
    )


def _outputs(request: TrainingRequest, given: ScoredWindow, store: ArtifactStore) -> pa.Table:
    """Row ids and outputs of all rows that the teacher scored, in the order of the snapshot."""
    columns, splits = request.columns, request.splits
    sha256 = request.dataset.snapshot.data.sha256
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
    return np.log(wide / (1 - wide)).astype(np.float32)
