import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.kernel.errors import TransientError
from tasks.training.data.decode import SnapshotFile
from tasks.training.data.source import Pool, RowSource, Shuffle
from tasks.training.data.store import RowStore
from tasks.training.strategies.base import Batch
from tests.support.data.builders import COLUMNS, YEAR, frame
from tests.support.training.reading_ranks import (
    NUM_SHARDS,
    PLAN,
    SHUFFLE,
    assert_equal,
    preprocessing,
    write,
)

NUMBER_OF_DISTINCT_VALUES = COLUMNS.numeric.index("late_rate_24h")


def source_of(
    snapshot: SnapshotFile,
    shards: range,
    folder: Path,
    shuffle: Shuffle = SHUFFLE,
    num_threads: int = 0,
) -> RowSource:
    store = RowStore(folder, snapshot, YEAR, shards, lambda: None)
    return RowSource(store, preprocessing(), shuffle, PLAN, num_threads=num_threads)


def distinct_values(batches: Iterator[Batch]) -> list[np.ndarray]:
    """A number of each row that no other row has, of each batch."""
    return [batch.inputs[1][:, NUMBER_OF_DISTINCT_VALUES].numpy() for batch in batches]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> SnapshotFile:
    return write(tmp_path_factory.mktemp("snapshot"), frame(901))


def laid_out(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """All numbers of some half-open ranges, one range after the other."""
    ranges = [np.arange(*pair) for pair in zip(starts, stops, strict=True)]
    return np.concatenate([np.empty(0, dtype=np.int64), *ranges])


def rows_of(shuffle: Shuffle, num_rows: int, epoch: int = 0, shard: int = 0) -> np.ndarray:
    """Row numbers of an epoch, in their order."""
    pools = shuffle.pools(shard, num_rows, epoch)
    rows = [laid_out(pool.starts, pool.stops)[pool.order] for pool in pools]
    return np.concatenate([np.empty(0, dtype=np.int64), *rows])


SHUFFLES = st.builds(
    Shuffle, seed=st.integers(0, 3), pool_rows=st.integers(1, 500), piece_rows=st.integers(1, 60)
)


@given(SHUFFLES, st.integers(0, 400), st.integers(0, 3), st.data())
def test_an_epoch_takes_every_row_once_and_can_be_entered_anywhere(
    shuffle: Shuffle, num_rows: int, epoch: int, data: st.DataObject
) -> None:
    np.testing.assert_array_equal(np.sort(rows_of(shuffle, num_rows, epoch)), np.arange(num_rows))
    first_row = data.draw(st.integers(0, num_rows))

    def fields(pools: Iterator[Pool]) -> list[tuple[int, list[int]]]:
        return [(pool.first_row, pool.order.tolist()) for pool in pools]

    whole = fields(shuffle.pools(0, num_rows, epoch))
    left = fields(shuffle.pools(0, num_rows, epoch, first_row))
    assert left == [(at, order) for at, order in whole if at + len(order) > first_row]
    for pool in shuffle.pools(0, num_rows, epoch):
        assert len(pool.order) <= shuffle.pool_rows + shuffle.piece_rows
        assert (pool.stops[:-1] < pool.starts[1:]).all()


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
def test_batches_hold_the_rows_of_the_order_whatever_the_step_and_the_threads(
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
    shuffle = Shuffle(3, pool_rows, piece_rows)
    shards = range(rank % size, NUM_SHARDS, size)
    source = source_of(snapshot, shards, tmp_path, shuffle, num_threads)
    blocks = np.concatenate([np.empty(0), *distinct_values(source.blocks())])
    of_shards = np.split(blocks, np.cumsum(list(source.sizes.values())))
    orders = [
        of_shards[number][rows_of(shuffle, num_rows, epoch, shard)]
        for number, (shard, num_rows) in enumerate(source.sizes.items())
    ]
    batches = list(source.batches(epoch, first_step))
    assert len(batches) == PLAN.num_steps - first_step
    for step, values in enumerate(distinct_values(iter(batches)), first_step):
        rows = slice(step * PLAN.rows_per_shard, (step + 1) * PLAN.rows_per_shard)
        np.testing.assert_array_equal(
            values, np.concatenate([np.empty(0), *(o[rows] for o in orders)])
        )
    for pair in zip(batches, list(source.batches(epoch))[first_step:], strict=True):
        assert_equal(*pair)


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("row-reader")]


def test_an_iterator_closed_early_leaves_no_thread_and_reads_a_bounded_number_of_pools_ahead(
    snapshot: SnapshotFile, tmp_path: Path
) -> None:
    reads: list[int] = []

    class CountingStore(RowStore):
        def read(self, shard: int, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
            reads.append(shard)
            return super().read(shard, starts, stops)

    store = CountingStore(tmp_path, snapshot, YEAR, range(NUM_SHARDS), lambda: None)
    rows = RowSource(store, preprocessing(), SHUFFLE, PLAN, num_threads=2).batches(0)
    next(rows)
    assert reader_threads()
    rows.close()
    assert reader_threads() == []
    # One pool of each shard in use and one ahead, of about four that the epoch takes.
    assert NUM_SHARDS <= len(reads) <= 2 * NUM_SHARDS


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_file_cut_in_the_middle_of_an_epoch_is_an_error_of_the_training_thread(
    snapshot: SnapshotFile, tmp_path: Path, num_threads: int
) -> None:
    rows = source_of(snapshot, range(NUM_SHARDS), tmp_path, num_threads=num_threads).batches(0)
    next(rows)
    (cut,) = tmp_path.rglob("shard-00002.rows")
    with cut.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(TransientError, match=r"rows of shard 2 cannot be read from .*it ends at"):
        list(rows)
    assert reader_threads() == []
