"""Opening a rank's rows: decode them, check them and fit the preprocessing, all ranks together."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema
from tasks.kernel.cores import usable_cores
from tasks.kernel.errors import DataContractError
from tasks.kernel.parts import PartialCopy
from tasks.training.config import PIECE_ROWS
from tasks.training.core.objective import StepPlan
from tasks.training.core.run_directory import RunDirectory, TrainingJob
from tasks.training.data import preprocess
from tasks.training.data.decode import RowFacts, SnapshotFile
from tasks.training.data.source import RowSource, Shuffle, merged_ranges
from tasks.training.data.store import RowStore
from tasks.training.strategies.base import Communicator

LOGGER = logging.getLogger(__name__)
# Larger than any shard, for a rank that holds none.
NO_SHARD = 2**62
# Threads of a GPU's rank that read ahead. Measured on 16 cores, rows/s: one 1.2 million, two 1.9,
# four 2.6, eight 3.6.
MOST_READERS = 8


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
    preprocessing: preprocess.Preprocessing
    plan: StepPlan


def open_sources(
    job: TrainingJob, ranks: Communicator, run: RunDirectory, on_progress: Callable[[], None]
) -> Sources:
    """A rank's training and validation rows, and the preprocessing of all. Collective.

    May be called again after the ranks have changed: what was decoded on this host is
    found again, and the preprocessing comes out the same.

    Args:
        job: snapshot, windows and configuration.
        ranks: all ranks; rank r of n holds the shards with shard % n == r.
        run: takes decoded rows, on this host's local disk; has the access to a remote snapshot.
        on_progress: called after each row group.

    Raises:
        DataContractError: the snapshot is not what was promised, or a window lacks rows.
        ArtifactError: a remote snapshot is absent or damaged.
        TransientError: its location does not answer.
        StorageError: the disk refused decoded rows.
    """
    config, splits = job.config, job.splits
    partial = PartialCopy(job.remote, run.location(job.remote.url)) if job.remote else None
    path, is_distilled = job.snapshot_path, job.distillation is not None
    snapshot = SnapshotFile(
        path, job.columns, config.num_shards, is_distilled=is_distilled, partial=partial
    )
    shards = range(ranks.rank, config.num_shards, ranks.size)
    training, validation = (
        RowStore(run.rows, snapshot, window, shards, on_progress)
        for window in (splits.train, splits.validation)
    )
    snapshot.close()
    if partial:
        LOGGER.info("brought %.1f MB of the snapshot", partial.num_bytes_brought / 1e6)
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
    on_gpu = config.device == "cuda"
    threads = num_readers(config.device, ranks.local_size)
    of_training, of_validation = (
        RowSource(store, preprocessing, shuffle, plan, num_threads=threads, pinned=on_gpu)
        for store in (training, validation)
    )
    LOGGER.info("holds %d of %d training rows", of_training.num_rows, num_rows)
    return Sources(of_training, of_validation, preprocessing, plan)


def num_readers(device: str, local_size: int) -> int:
    """Threads of a rank that read ahead, on cores that are free while its GPU works.

    Args:
        device: `cpu` or `cuda`.
        local_size: ranks of this host.
    """
    free = usable_cores() // local_size - 1
    return min(max(free, 1), MOST_READERS) if device == "cuda" else 0


def _check_labels(
    store: RowStore, job: TrainingJob, window: TimeWindow, ranks: Communicator
) -> int:
    """Rows of a window over all ranks; refuse a window whose labels are all equal. Collective."""
    num_rows, mean, squares = label_moments(total_facts(store, job.columns), ranks)
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


# Rows over all shards from which the quantiles of numbers are taken.
MAX_SAMPLE_ROWS = 100_000


def total_facts(store: RowStore, columns: DatasetSchema) -> RowFacts:
    """Facts about all rows of a store."""
    total = RowFacts.none_of(columns)
    for facts in store.facts.values():
        total.add(facts)
    return total


def fit_on_all_ranks(
    job: TrainingJob, store: RowStore, ranks: Communicator
) -> preprocess.Preprocessing:
    """Fit vocabularies on all training rows and bins on a seeded sample of them. Collective.

    Every rank brings counts and a sample of its own shards and fits on what all brought, so that
    all get the same result, whatever their number and wherever their rows lie.

    Args:
        job: columns and configuration.
        store: this rank's training rows.
        ranks: all ranks.

    Raises:
        DataContractError: two categories of one column share a code, or all labels are equal.
    """
    columns, config = job.columns, job.config
    facts = total_facts(store, columns)
    sample = sample_numbers(store, config.num_shards, config.seed)
    of_each = cast(list[dict[str, dict[str, int]]], ranks.gather_values(facts.category_counts))
    merged: dict[str, Counter[str]] = {name: Counter() for name in columns.categorical}
    for of_names in of_each:
        for name, of_rank in of_names.items():
            merged[name].update(of_rank)
    labels = fit_labels(facts, job, ranks) if columns.task == "regression" else None
    totals = ranks.sum(np.append(facts.num_missing, facts.num_rows).astype(np.float64))
    return preprocess.fit_preprocessing(
        columns,
        merged,
        ranks.gather_rows(sample),
        [bool(0 < missing < totals[-1]) for missing in totals[:-1]],
        min_category_rows=config.min_category_rows,
        num_bins=config.num_bins,
        labels=labels,
    )


def fit_labels(facts: RowFacts, job: TrainingJob, ranks: Communicator) -> preprocess.LabelScale:
    """Mean and standard deviation of all ranks' labels. Collective.

    Args:
        facts: of the rows that this rank brings.
        job: column and window, for people.
        ranks: all ranks.

    Raises:
        DataContractError: all labels are equal, or too large for 32-bit floats.
    """
    num_rows, mean, squares = label_moments(facts, ranks)
    deviation = float(np.float32(math.sqrt(squares / num_rows)))
    if not 0 < deviation < preprocess.MAX_MAGNITUDE or abs(mean) >= preprocess.MAX_MAGNITUDE:
        raise DataContractError(
            f"label {job.columns.label!r} has mean {mean:g} and standard deviation {deviation:g} "
            f"in {num_rows} training rows of {job.splits.train}; expected numbers that differ, "
            f"below {preprocess.MAX_MAGNITUDE:g}. Mend the query of the training set"
        )
    return preprocess.LabelScale(mean=float(np.float32(mean)), deviation=deviation)


def label_moments(facts: RowFacts, ranks: Communicator) -> tuple[int, float, float]:
    """Rows of all ranks, the mean of their labels and the squared distances from it. Collective."""
    num_rows, total = ranks.sum(np.array([facts.num_rows, facts.num_rows * facts.label_mean]))
    mean = float(total / max(num_rows, 1))
    own = facts.label_squares + facts.num_rows * (facts.label_mean - mean) ** 2
    return int(num_rows), mean, float(ranks.sum(np.array([own]))[0])


def sample_numbers(store: RowStore, num_shards: int, seed: int) -> preprocess.Float32Array:
    """Numbers of equally many random rows of each shard, the same for any number of ranks."""
    layout, wanted = store.layout, -(-MAX_SAMPLE_ROWS // num_shards)
    sample = [np.empty((0, layout.num_numeric), dtype=np.float32)]
    for shard, facts in store.facts.items():
        generator = np.random.default_rng((seed, shard))
        rows = generator.choice(facts.num_rows, min(facts.num_rows, wanted), replace=False)
        rows.sort()
        sample.append(layout.numeric(store.read(shard, *merged_ranges(rows, rows + 1))))
    return np.concatenate(sample)
