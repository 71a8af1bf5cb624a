"""Snapshots in a location, of which a host brings the row groups that its ranks hold."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ArtifactError, StorageError, TransientError
from tasks.kernel.files import digest_of
from tasks.kernel.location import Location, object_name
from tasks.kernel.parts import PARTIAL, PARTS_FILE, SHARED, PartialCopy, RemoteFile, described
from tasks.kernel.settings import ArtifactStore
from tasks.training.data.decode import SnapshotFile
from tests.support.data.builders import COLUMNS, dataset, frame, month
from tests.support.training.reading_ranks import job, opened, write


@dataclass
class Stored:
    """A snapshot on this disk, and the same in a location."""

    folder: Path
    whole: Path
    sha256: str
    parts: list[tuple[int, str]]

    @classmethod
    def of(cls, folder: Path, num_rows: int = 600, group_rows: int = 60) -> "Stored":
        write(folder, frame(num_rows), group_rows)
        whole = folder / "data.parquet"
        (folder / PARTS_FILE).write_text(described(whole))
        digest, _ = Location.of((folder / "lake").as_uri()).send_content(whole)
        return cls(folder, whole, digest, json.loads((folder / PARTS_FILE).read_text()))

    @property
    def content(self) -> Path:
        """The object in the location."""
        return self.folder / "lake" / object_name(self.sha256)

    @property
    def remote(self) -> RemoteFile:
        path, url = self.folder / PARTIAL / "data.parquet", (self.folder / "lake").as_uri()
        return RemoteFile(path=path, url=url, sha256=self.sha256)

    def copy(self) -> PartialCopy:
        """What a host that has nothing yet opens, or has opened before."""
        return PartialCopy(self.remote, Location.of(self.remote.url))


def decoded(snapshot: SnapshotFile, shards: Sequence[int], window: TimeWindow) -> list[bytes]:
    rows = [
        shard.to_bytes(4, "big") + words.tobytes()
        for number, group in snapshot.groups(window).items()
        for shard, words, _ in snapshot.decode(number, group, shards, window)
    ]
    snapshot.close()
    return rows


def counted_reads(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each request for a part from now on."""
    read: list[int] = []
    reading = Location.read

    def counted(
        self: Location, name: str, start: int = 0, length: int | None = None
    ) -> bytes | None:
        read.append(length or 0)
        return reading(self, name, start, length)

    patch.setattr(Location, "read", counted)
    return read


@settings(max_examples=30)
@given(st.data())
def test_any_rows_that_are_read_from_a_location_equal_those_of_the_whole_file(
    data: st.DataObject,
) -> None:
    num_shards = data.draw(st.integers(1, 9))
    shards = sorted(data.draw(st.sets(st.integers(0, num_shards - 1), min_size=1)))
    window = month(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6)))
    with tempfile.TemporaryDirectory() as folder:
        rows, group_rows = data.draw(st.integers(1, 500)), data.draw(st.integers(5, 200))
        stored = Stored.of(Path(folder), rows, group_rows)
        local = SnapshotFile(stored.whole, COLUMNS, num_shards)
        groups = local.groups(window)
        partial = stored.copy()
        ranged = SnapshotFile(partial.path, COLUMNS, num_shards, partial=partial)
        assert decoded(ranged, shards, window) == decoded(local, shards, window)
        held = [number for number, group in groups.items() if group.shards() & set(shards)]
        assert partial.num_bytes_brought == sum([stored.parts[number][0] for number in (*held, -1)])
        assert sum(length for length, _ in stored.parts) == stored.whole.stat().st_size


@pytest.mark.parametrize(
    ("number", "name"), [(0, "row group 0"), (7, "row group 7"), (-1, "the footer")]
)
def test_a_byte_that_was_changed_is_named_with_its_row_group_and_both_digests(
    number: int, name: str, tmp_path: Path
) -> None:
    stored = Stored.of(tmp_path)
    lengths = [length for length, _ in stored.parts]
    start = sum(lengths[:number])
    content = bytearray(stored.content.read_bytes())
    content[start + lengths[number] // 2] ^= 1
    stored.content.write_bytes(content)
    seen = hashlib.sha256(content[start : start + lengths[number]]).hexdigest()
    expected = f"{name} of .* has SHA-256 {seen[:12]}, expected {stored.parts[number][1][:12]}"
    with pytest.raises(ArtifactError, match=expected):
        stored.copy().bring(number)
    stored.copy().bring(3)


def test_content_that_was_cut_or_is_gone_is_told(tmp_path: Path) -> None:
    stored = Stored.of(tmp_path)
    stored.content.write_bytes(stored.content.read_bytes()[:5000])
    with pytest.raises(ArtifactError, match="is shorter than it was"):
        stored.copy().bring(-1)
    stored.content.unlink()
    with pytest.raises(
        ArtifactError, match=r"the footer of .* is absent, expected .* Remove it, and run"
    ):
        stored.copy().bring(-1)


def test_what_is_there_is_not_brought_again_and_what_was_lost_is(tmp_path: Path) -> None:
    stored = Stored.of(tmp_path)
    first = stored.copy()
    for number in (2, 3, -1):
        first.bring(number)
    with first.path.open("r+b") as file:  # as a loss of power may leave it
        file.seek(sum(length for length, _ in stored.parts[:3]) + 10)
        file.write(bytes(50))
    again = stored.copy()
    for number in (2, 3, -1):
        again.bring(number)
    assert again.num_bytes_brought == stored.parts[3][0]
    shutil.rmtree(tmp_path / "lake")
    stored.copy().bring(3)


def test_what_needs_the_whole_completes_what_ranks_have_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location.of((tmp_path / "lake").as_uri())
    here, there = (ArtifactStore(tmp_path / name, location) for name in ("a", "b"))
    snapshot = dataset(here, frame(3000)).snapshot
    assert here.remote(snapshot.data, snapshot.parts) is None
    assert there.remote(snapshot.data, None) is None
    remote = there.remote(snapshot.data, snapshot.parts)
    assert remote is not None
    copy = PartialCopy(remote, Location.of(remote.url))
    used = copy.path.parent.with_name(SHARED)
    for number in (0, 5, -1):
        os.utime(used, (0, 0))
        copy.bring(number)
        assert used.stat().st_mtime > 0, "what is in use is not removed for others"
    read = counted_reads(monkeypatch)
    whole = there.path(snapshot.data)
    assert sum(read) == snapshot.data.num_bytes - copy.num_bytes_brought
    assert there.remote(snapshot.data, snapshot.parts) is None
    copy.bring(3)
    copy.path.unlink()
    with pytest.raises(TransientError, match=r"made room for others.* Run again"):
        copy.bring(4)
    whole.write_bytes(b"damaged")
    assert digest_of(there.path(snapshot.data)) == snapshot.data.sha256


def test_a_disk_that_refuses_the_copy_is_a_storage_error(tmp_path: Path) -> None:
    stored = Stored.of(tmp_path)
    (tmp_path / PARTIAL).symlink_to("/proc/self")  # a folder in which nothing can be made
    with pytest.raises(StorageError, match="the disk refused a write"):
        stored.copy()


def test_ranks_of_a_host_bring_each_row_group_once_and_read_what_they_would_read_locally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored.of(tmp_path, 1600, 100)
    local = job(tmp_path)
    work = local.model_copy(update={"snapshot_path": stored.remote.path, "remote": stored.remote})
    read = counted_reads(monkeypatch)
    here, there = opened(local, tmp_path, 3), opened(work, tmp_path / "host", 3)
    whole = SnapshotFile(stored.whole, COLUMNS, 4)
    wanted = {*whole.groups(local.splits.train), *whole.groups(local.splits.validation), -1}
    assert sum(read) == sum(stored.parts[number][0] for number in wanted)
    assert sum(read) < stored.whole.stat().st_size
    for one, other in zip(here, there, strict=True):
        assert one.training.sizes == other.training.sizes
        for ours, theirs in zip(one.training.batches(0), other.training.batches(0), strict=True):
            np.testing.assert_array_equal(ours.labels.numpy(), theirs.labels.numpy())


@pytest.mark.parametrize("left", [b"", b"[]", None])
def test_digests_that_were_damaged_are_brought_again_and_the_whole_is(
    tmp_path: Path, left: bytes | None
) -> None:
    lake = Location.of((tmp_path / "lake").as_uri())
    here = dataset(ArtifactStore(tmp_path / "here", lake), frame(600)).snapshot
    there = ArtifactStore(tmp_path / "there", lake)
    assert here.parts is not None
    digests = there.path(here.parts)
    path = digests.parent / PARTIAL / "data.parquet"
    remote = RemoteFile(
        path=path, url=lake.url, sha256=here.data.sha256, parts_sha256=here.parts.sha256
    )
    PartialCopy(remote, lake).bring(-1)
    digests.unlink()
    if left is not None:
        digests.write_bytes(left)
    assert digest_of(there.path(here.data)) == here.data.sha256
    PartialCopy(remote, lake).bring(0)
