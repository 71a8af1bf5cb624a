"""Opening a rank's rows: choose how to hold them, decode them, check and fit them together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import psutil

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError
from tasks.training.core.run_directory import TrainingJob
from tasks.training.core.schedule import StepPlan
from tasks.training.data.config import PIECE_ROWS, ReadingMode
from tasks.training.data.decode import RowFacts, SnapshotFile
from tasks.training.data.fitting import fit_on_all_ranks, label_moments, total_facts
from tasks.training.data.memory import MemoryRows
from tasks.training.data.preprocess import Preprocessing
from tasks.training.data.source import RowSource, Shuffle, Sources
from tasks.training.data.store import FileStore, MemoryStore, ShardStore
from tasks.training.data.stream import StreamedRows
from tasks.training.strategies.base import Communicator

LOGGER = logging.getLogger(__name__)
# Positions of categories are 8 bytes in memory, 4 in a row of words.
BYTES_BESIDE_WORDS = 4
MEMORY_SHARE = 0.5
"""Of the host's free memory that rows of all its ranks may take: the rest is for the network, the
optimizer and checkpoints."""
# Larger than any shard, for a rank that holds none.
NO_SHARD = 2**62
CGROUP = Path("/sys/fs/cgroup")


def open_sources(
    job: TrainingJob,
    exchange: Communicator,
    rank: int,
    size: int,
    folder: Path,
    on_progress: Callable[[], None],
) -> Sources:
    """A rank's training and validation rows, and the preprocessing of all. Collective.

    May be called again after the ranks have changed: what was decoded into `folder` on this host is
    found again, and the preprocessing comes out the same.

    Args:
        job: snapshot, windows and configuration.
        exchange: all ranks, also those that share a replica.
        rank: which part of the data this rank reads; ranks that share a replica read the same.
        size: parts that the data is cut into; rank r holds the shards with shard % size == r.
        folder: on this host's local disk; takes decoded rows where they are streamed.
        on_progress: called after each row group.

    Raises:
        DataContractError: the snapshot is not what was promised, or a window lacks rows.
        StorageError: the disk has not enough space for decoded rows, or refused them.
    """
    snapshot = SnapshotFile(
        job.snapshot_path, job.columns, job.config.num_shards, is_taught=job.lesson is not None
    )
    shards = range(rank, job.config.num_shards, size)
    splits = job.splits
    mode, reason = _agreed_mode(job, snapshot, len(shards), exchange)
    stores = [
        MemoryStore(snapshot, window, shards, on_progress)
        if mode == "memory"
        else FileStore(folder, snapshot, window, shards, on_progress)
        for window in (splits.train, splits.validation)
    ]
    snapshot.close()
    parts = cast(list[int], exchange.gather_values(rank))
    speaks = parts.index(rank) == exchange.rank
    num_rows = _check_labels("training", stores[0], job, splits.train, exchange, speaks)
    _check_labels("validation", stores[1], job, splits.validation, exchange, speaks)
    _check_shards(stores[0], job)
    preprocessing = fit_on_all_ranks(job, stores[0], exchange, speaks=speaks)
    smallest = min((facts.num_rows for facts in stores[0].facts.values()), default=NO_SHARD)
    plan = StepPlan.of(exchange.minimum(smallest), job.config)
    # Nothing that depends on the ranks or the mode decides which rows a step takes.
    pool_rows = max(PIECE_ROWS, job.config.reading.shuffle_rows // job.config.num_shards)
    shuffle = Shuffle(job.config.seed, pool_rows, PIECE_ROWS, plan)
    if exchange.rank == 0:
        LOGGER.info("%s", reason)
    if not stores[0].facts:
        LOGGER.warning(
            "holds no rows: part %d of %d gets none of the shards. It takes part in every step "
            "all the same; lower num_ranks or raise num_shards",
            rank,
            size,
        )
    training, validation = (
        _open_source(store, job, snapshot, preprocessing, shuffle) for store in stores
    )
    LOGGER.info("holds %d of %d training rows", training.num_rows, num_rows)
    return Sources(training, validation, preprocessing, plan, num_rows, mode, reason)


def _open_source(
    store: MemoryStore | FileStore,
    job: TrainingJob,
    snapshot: SnapshotFile,
    preprocessing: Preprocessing,
    shuffle: Shuffle,
) -> RowSource:
    """Rows as the loop takes them; with a GPU in page-locked memory.

    A thread reads ahead there alone, where the rank's core is free while the GPU works: a rank
    that computes on its core has no other for it, and leaves that to the kernel.
    """
    on_gpu = job.config.device == "cuda"
    if isinstance(store, MemoryStore):
        return MemoryRows(store, snapshot.layout, preprocessing, shuffle, pinned=on_gpu)
    return StreamedRows(
        store,
        snapshot.layout,
        preprocessing,
        shuffle,
        num_threads=1 if on_gpu else 0,
        pinned=on_gpu,
    )


def _agreed_mode(
    job: TrainingJob,
    snapshot: SnapshotFile,
    num_own_shards: int,
    exchange: Communicator,
) -> tuple[ReadingMode, str]:
    """The mode of all ranks, and why: `auto` streams where one rank's rows do not fit."""
    reading = job.config.reading
    if reading.mode != "auto":
        return reading.mode, f"reading mode {reading.mode!r} is configured"
    layout, splits = snapshot.layout, job.splits
    num_rows = sum(
        group.num_rows
        for window in (splits.train, splits.validation)
        for group in snapshot.groups(window).values()
    )
    row_bytes = layout.row_bytes + BYTES_BESIDE_WORDS * layout.num_categorical
    needed = num_rows * row_bytes * num_own_shards // job.config.num_shards
    allowed = int(MEMORY_SHARE * free_memory_bytes() / exchange.local_size)
    # In KiB: the exchange carries whole numbers, and which rank is tightest decides for all.
    spare_kib = exchange.minimum((allowed - needed) // 1024)
    mode: ReadingMode = "memory" if spare_kib >= 0 else "stream"
    return mode, (
        f"reading mode {mode!r}: this rank's rows take {needed / 2**20:,.0f} MiB of "
        f"{allowed / 2**20:,.0f} MiB ({MEMORY_SHARE:g} of what is free, over "
        f"{exchange.local_size} rank(s) of this host); the tightest rank has "
        f"{spare_kib / 2**10:,.0f} MiB to spare"
    )


def free_memory_bytes() -> int:
    """Bytes that new data may take on this host, within this process's control group."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
    except FileNotFoundError:
        return free
    return free if limit.strip() == "max" else min(free, max(0, int(limit) - int(used)))


def _check_labels(
    name: str,
    store: ShardStore,
    job: TrainingJob,
    window: TimeWindow,
    exchange: Communicator,
    speaks: bool,
) -> int:
    """Rows of a window over all ranks; refuse a window whose labels are all equal. Collective."""
    facts = total_facts(store, job.columns) if speaks else RowFacts.none_of(job.columns)
    num_rows, mean, squares = label_moments(facts, exchange)
    if squares <= 0:
        raise DataContractError(
            f"the {name} window {window} has {num_rows} rows, and label {job.columns.label!r} is "
            f"{mean:g} in all of them; expected rows with different labels. Widen the window or "
            "build the snapshot again"
        )
    return num_rows


def _check_shards(store: ShardStore, job: TrainingJob) -> None:
    """Refuse training rows that leave one of this rank's shards empty."""
    empty = [shard for shard, facts in store.facts.items() if facts.num_rows == 0]
    if empty:
        num_rows = total_facts(store, job.columns).num_rows
        raise DataContractError(
            f"shard(s) {', '.join(map(str, empty))} of {job.config.num_shards} have no training "
            f"rows: the snapshot holds {num_rows} of this rank's rows in {job.splits.train}. Widen "
            "the training window or lower num_shards"
        )
