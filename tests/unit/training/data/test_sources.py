from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.kernel.errors import TransientError
from tasks.training.data.decode import SnapshotFile
from tasks.training.data.memory import MemoryRows
from tasks.training.data.source import RowSource, Shuffle
from tasks.training.data.store import FileStore, MemoryStore
from tasks.training.data.stream import StreamedRows
from tasks.training.strategies.base import Batch
from tests.support.data.builders import COLUMNS, YEAR, frame
from tests.support.training.row_files import (
    NUM_SHARDS,
    PLAN,
    SHUFFLE,
    assert_equal,
    preprocessing,
    write,
)

NUMBER_OF_DISTINCT_VALUES = COLUMNS.numeric.index("late_rate_24h")


def in_memory(snapshot: SnapshotFile, shards: range, shuffle: Shuffle = SHUFFLE) -> MemoryRows:
    store = MemoryStore(snapshot, YEAR, shards, lambda: None)
    return MemoryRows(store, snapshot.layout, preprocessing(), shuffle, pinned=False)


def streamed(
    snapshot: SnapshotFile,
    shards: range,
    folder: Path,
    shuffle: Shuffle = SHUFFLE,
    num_threads: int = 1,
) -> StreamedRows:
    store = FileStore(folder, snapshot, YEAR, shards, lambda: None)
    return StreamedRows(
        store,
        snapshot.layout,
        preprocessing(),
        shuffle,
        num_threads=num_threads,
        pinned=False,
    )


def distinct_values(batches: Iterator[Batch]) -> list[np.ndarray]:
    """A number of each row that no other row has, of each batch."""
    return [batch.inputs[1][:, NUMBER_OF_DISTINCT_VALUES].numpy() for batch in batches]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> SnapshotFile:
    return write(tmp_path_factory.mktemp("snapshot"), frame(901))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(0, 6),
    size=st.integers(1, 7),
    epoch=st.integers(0, 3),
    first_step=st.integers(0, PLAN.num_steps),
    pool_rows=st.integers(1, 400),
    piece_rows=st.integers(1, 40),
    num_threads=st.integers(0, 3),
)
def test_rows_from_files_make_the_batches_that_rows_in_memory_make(
    snapshot: SnapshotFile,
    tmp_path: Path,
    rank: int,
    size: int,
    epoch: int,
    first_step: int,
    pool_rows: int,
    piece_rows: int,
    num_threads: int,
) -> None:
    shuffle = Shuffle(3, pool_rows, piece_rows, PLAN)
    shards = range(rank % size, NUM_SHARDS, size)
    memory = in_memory(snapshot, shards, shuffle)
    stream = streamed(snapshot, shards, tmp_path, shuffle, num_threads)
    assert memory.sizes == stream.sizes
    ours = list(stream.batches(epoch, first_step))
    assert len(ours) == PLAN.num_steps - first_step
    for pair in zip(memory.batches(epoch, first_step), ours, strict=True):
        assert_equal(*pair)
    for pair in zip(memory.blocks(), stream.blocks(), strict=True):
        assert_equal(*pair)


def test_a_step_holds_the_same_rows_for_any_number_of_ranks(
    snapshot: SnapshotFile, tmp_path: Path
) -> None:
    def steps(size: int) -> list[np.ndarray]:
        ranks = [
            distinct_values(streamed(snapshot, range(r, NUM_SHARDS, size), tmp_path).batches(1))
            for r in range(size)
        ]
        return [np.sort(np.concatenate(step)) for step in zip(*ranks, strict=True)]

    alone = steps(1)
    assert len(alone) == PLAN.num_steps
    assert all(len(step) == NUM_SHARDS * PLAN.rows_per_shard for step in alone)
    for size in (2, 3, 4, 7):
        np.testing.assert_array_equal(steps(size), alone)


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_an_epoch_goes_on_at_any_step(snapshot: SnapshotFile, tmp_path: Path, mode: str) -> None:
    shards = range(0, NUM_SHARDS, 2)
    source: RowSource = (
        in_memory(snapshot, shards) if mode == "memory" else streamed(snapshot, shards, tmp_path)
    )
    unbroken = list(source.batches(2))
    for first_step in (1, 5, PLAN.num_steps - 1, PLAN.num_steps):
        later = list(source.batches(2, first_step))
        assert len(later) == PLAN.num_steps - first_step
        for pair in zip(later, unbroken[first_step:], strict=True):
            assert_equal(*pair)


def test_an_epoch_takes_no_row_twice_and_rests_others_the_next_time(
    snapshot: SnapshotFile, tmp_path: Path
) -> None:
    source = streamed(snapshot, range(NUM_SHARDS), tmp_path)
    first, second = (np.concatenate(distinct_values(source.batches(epoch))) for epoch in (0, 1))
    num_taken = NUM_SHARDS * PLAN.num_steps * PLAN.rows_per_shard
    assert len(np.unique(first)) == len(first) == num_taken < source.num_rows
    assert set(first) != set(second)
    blocks = np.concatenate(distinct_values(source.blocks()))
    assert set(first) | set(second) <= set(blocks)
    assert len(np.unique(blocks)) == source.num_rows


@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_a_rank_without_shards_gets_batches_without_rows(
    snapshot: SnapshotFile, tmp_path: Path, mode: str
) -> None:
    nothing = range(6, NUM_SHARDS, 8)
    source: RowSource = (
        in_memory(snapshot, nothing) if mode == "memory" else streamed(snapshot, nothing, tmp_path)
    )
    assert (source.sizes, source.num_rows) == ({}, 0)
    batches = list(source.batches(0, 3))
    assert len(batches) == PLAN.num_steps - 3
    positions, numeric = batches[0].inputs
    assert positions.shape == (0, len(COLUMNS.categorical))
    assert numeric.shape == (0, len(COLUMNS.numeric))
    assert list(source.blocks()) == []


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("row-reader")]


def test_an_iterator_closed_early_leaves_no_thread(snapshot: SnapshotFile, tmp_path: Path) -> None:
    source = streamed(snapshot, range(NUM_SHARDS), tmp_path, num_threads=2)
    for rows in (source.batches(0), source.blocks()):
        next(rows)
        assert reader_threads()
        rows.close()
        assert reader_threads() == []
    assert len(list(source.batches(0))) == PLAN.num_steps
    assert reader_threads() == []


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_a_file_cut_in_the_middle_of_an_epoch_is_an_error_of_the_training_thread(
    snapshot: SnapshotFile, tmp_path: Path, num_threads: int
) -> None:
    source = streamed(snapshot, range(NUM_SHARDS), tmp_path, num_threads=num_threads)
    rows = source.batches(0)
    next(rows)
    (cut,) = tmp_path.rglob("shard-00002.rows")
    with cut.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(TransientError, match=r"rows of shard 2 cannot be read from .*it ends at"):
        list(rows)
    assert reader_threads() == []


def test_without_reader_threads_none_is_started(snapshot: SnapshotFile, tmp_path: Path) -> None:
    rows = streamed(snapshot, range(NUM_SHARDS), tmp_path, num_threads=0).batches(0)
    next(rows)
    assert reader_threads() == []
    rows.close()


def test_a_bounded_number_of_pools_is_read_ahead(snapshot: SnapshotFile, tmp_path: Path) -> None:
    reads: list[int] = []

    class CountingStore(FileStore):
        def read(self, shard: int, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
            reads.append(shard)
            return super().read(shard, starts, stops)

    store = CountingStore(tmp_path, snapshot, YEAR, range(NUM_SHARDS), lambda: None)
    source = StreamedRows(
        store,
        snapshot.layout,
        preprocessing(),
        SHUFFLE,
        num_threads=2,
        pinned=False,
    )
    rows = source.batches(0)
    next(rows)
    rows.close()
    # One pool of each shard in use and one ahead, of about four that the epoch takes.
    assert NUM_SHARDS <= len(reads) <= 2 * NUM_SHARDS
