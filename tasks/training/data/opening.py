"""Opening a rank's rows: decode them, check them and fit the preprocessing, all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError
from tasks.training.core.run_directory import TrainingJob
from tasks.training.core.schedule import StepPlan
from tasks.training.data.config import PIECE_ROWS
from tasks.training.data.decode import SnapshotFile
from tasks.training.data.fitting import fit_on_all_ranks, label_moments, total_facts
from tasks.training.data.preprocess import Preprocessing
from tasks.training.data.source import RowSource, Shuffle
from tasks.training.data.store import RowStore
from tasks.training.strategies.base import Communicator

LOGGER = logging.getLogger(__name__)
# Larger than any shard, for a rank that holds none.
NO_SHARD = 2**62


@dataclass(frozen=True)
class Sources:
    """What `open_sources` gives a rank.

    Args:
        training: this rank's training rows.
        validation: this rank's validation rows; may be none.
        preprocessing: fitted on all ranks' training rows; equal on all ranks.
        plan: steps of an epoch; equal on all ranks.
    """

    training: RowSource
    validation: RowSource
    preprocessing: Preprocessing
    plan: StepPlan


def open_sources(
    job: TrainingJob,
    ranks: Communicator,
    folder: Path,
    on_progress: Callable[[], None],
) -> Sources:
    """A rank's training and validation rows, and the preprocessing of all. Collective.

    May be called again after the ranks have changed: what was decoded into `folder` on this host is
    found again, and the preprocessing comes out the same.

    Args:
        job: snapshot, windows and configuration.
        ranks: all ranks; rank r of n holds the shards with shard % n == r.
        folder: on this host's local disk; takes decoded rows.
        on_progress: called after each row group.

    Raises:
        DataContractError: the snapshot is not what was promised, or a window lacks rows.
        StorageError: the disk refused decoded rows.
    """
    config, splits = job.config, job.splits
    snapshot = SnapshotFile(
        job.snapshot_path, job.columns, config.num_shards, is_distilled=job.distillation is not None
    )
    shards = range(ranks.rank, config.num_shards, ranks.size)
    training, validation = (
        RowStore(folder, snapshot, window, shards, on_progress)
        for window in (splits.train, splits.validation)
    )
    snapshot.close()
    num_rows = _check_labels(training, job, splits.train, ranks)
    _check_labels(validation, job, splits.validation, ranks)
    _check_shards(training, job)
    preprocessing = fit_on_all_ranks(job, training, ranks)
    smallest = min((facts.num_rows for facts in training.facts.values()), default=NO_SHARD)
    plan = StepPlan.of(ranks.minimum(smallest), config)
    # Nothing that depends on the ranks decides which rows a step takes.
    pool_rows = max(PIECE_ROWS, config.reading.shuffle_rows // config.num_shards)
    shuffle = Shuffle(config.seed, pool_rows, PIECE_ROWS)
    if not shards:
        LOGGER.warning(
            "holds no rows: part %d of %d gets none of the shards. It takes part in every step "
            "all the same; lower launch.ranks or raise num_shards",
            ranks.rank,
            ranks.size,
        )
    # A thread reads ahead where the rank's core is free while the GPU works.
    on_gpu = config.device == "cuda"
    of_training, of_validation = (
        RowSource(store, preprocessing, shuffle, plan, num_threads=int(on_gpu), pinned=on_gpu)
        for store in (training, validation)
    )
    LOGGER.info("holds %d of %d training rows", of_training.num_rows, num_rows)
    return Sources(of_training, of_validation, preprocessing, plan)


def _check_labels(
    store: RowStore, job: TrainingJob, window: TimeWindow, ranks: Communicator
) -> int:
    """Rows of a window over all ranks; refuse a window whose labels are all equal. Collective."""
    facts = total_facts(store, job.columns)
    num_rows, mean, squares = label_moments(facts, ranks)
    if squares <= 0:
        name = "training" if window == job.splits.train else "validation"
        raise DataContractError(
            f"the {name} window {window} has {num_rows} rows, and label {job.columns.label!r} is "
            f"{mean:g} in all of them; expected rows with different labels. Widen the window or "
            "build the snapshot again"
        )
    return num_rows


def _check_shards(store: RowStore, job: TrainingJob) -> None:
    """Refuse training rows that leave one of this rank's shards empty."""
    empty = [shard for shard, facts in store.facts.items() if facts.num_rows == 0]
    if empty:
        num_rows = total_facts(store, job.columns).num_rows
        raise DataContractError(
            f"shard(s) {', '.join(map(str, empty))} of {job.config.num_shards} have no training "
            f"rows: the snapshot holds {num_rows} of this rank's rows in {job.splits.train}. Widen "
            "the training window or lower num_shards"
        )
