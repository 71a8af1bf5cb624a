from pathlib import Path

import numpy as np
import pytest

from tasks.kernel.errors import StorageError, TransientError
from tasks.kernel.process import ProcessName
from tasks.training.data.decode import SnapshotFile
from tasks.training.data.store import ASIDE, RowStore
from tests.support.data.builders import YEAR, frame, month
from tests.support.training.reading_ranks import write

NUM_SHARDS = 4


@pytest.fixture
def snapshot(tmp_path: Path) -> SnapshotFile:
    return write(tmp_path, frame(900), 100, NUM_SHARDS)


def open_store(folder: Path, snapshot: SnapshotFile, *shards: int) -> tuple[RowStore, int]:
    """A store in files, and how many row groups were looked at to make it."""
    groups: list[int] = []
    return RowStore(folder, snapshot, YEAR, shards, lambda: groups.append(1)), len(groups)


def test_decoded_shards_are_found_again_and_only_others_decoded(
    tmp_path: Path, snapshot: SnapshotFile
) -> None:
    first, looked_at = open_store(tmp_path / "rows", snapshot, 0, 2)
    assert looked_at == 9
    again, looked_at = open_store(tmp_path / "rows", snapshot, 0, 2)
    assert looked_at == 0
    more, looked_at = open_store(tmp_path / "rows", snapshot, 0, 1, 2, 3)
    assert looked_at == 9
    assert list(more.facts) == [0, 1, 2, 3]
    for store in (again, more):
        assert store.facts[2].category_counts == first.facts[2].category_counts
        everything = np.array([0]), np.array([first.facts[2].num_rows])
        np.testing.assert_array_equal(store.read(2, *everything), first.read(2, *everything))


def test_rows_of_another_snapshot_or_window_are_not_taken(
    tmp_path: Path, snapshot: SnapshotFile
) -> None:
    open_store(tmp_path / "rows", snapshot, 0)
    changed = write(tmp_path, frame(900, seed=1), 100, NUM_SHARDS)
    store, looked_at = open_store(tmp_path / "rows", changed, 0)
    assert looked_at == 9
    march = RowStore(tmp_path / "rows", changed, month(3), [0], lambda: None)
    assert 0 < march.facts[0].num_rows < store.facts[0].num_rows


def test_a_file_that_was_cut_is_decoded_again(tmp_path: Path, snapshot: SnapshotFile) -> None:
    store, _ = open_store(tmp_path / "rows", snapshot, 0)
    (path,) = tmp_path.rglob("*.rows")
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(TransientError, match="A new attempt decodes them again"):
        store.read(0, np.array([0]), np.array([50]))
    whole, looked_at = open_store(tmp_path / "rows", snapshot, 0)
    assert looked_at == 9
    assert len(whole.read(0, np.array([0]), np.array([50]))) == 50


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    tmp_path: Path, snapshot: SnapshotFile
) -> None:
    (tmp_path / "rows").symlink_to("/proc/self")  # a folder in which nothing can be made
    with pytest.raises(StorageError, match="the disk refused a write"):
        open_store(tmp_path / "rows", snapshot, 0)


def test_what_a_killed_process_left_half_written_is_removed(
    tmp_path: Path, snapshot: SnapshotFile
) -> None:
    open_store(tmp_path / "rows", snapshot, 0)
    (folder,) = (tmp_path / "rows").iterdir()
    mine = ProcessName.of_this()
    abandoned = folder / f"{ASIDE}-{mine.model_copy(update={'start': mine.start + 1}).token}-0"
    ours = folder / f"{ASIDE}-{mine.token}-0"
    for path in (abandoned, ours):
        path.mkdir()
        (path / "3").write_bytes(b"half")
    open_store(tmp_path / "rows", snapshot, 0)
    assert not abandoned.exists()
    assert ours.exists()
