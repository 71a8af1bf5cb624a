"""Decoded rows of a rank's shards, in memory or in files, and the one pass that decodes them.

Files are written once on a host and found again: by a rank that takes over a shard, and by a run
that goes on after a crash. They are read with `pread`, not mapped: what the kernel caches of them
is not memory of this process, and gives way when memory is short.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import TypeAdapter

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import StorageError, TransientError, refused_writes_explained
from tasks.kernel.files import write_atomically
from tasks.kernel.process import boot_id
from tasks.kernel.scratch import remove_abandoned, scratch_folder
from tasks.kernel.settings import content_key
from tasks.training.data.decode import RowFacts, SnapshotFile
from tasks.training.data.preprocess import Int32Array, Int64Array
from tasks.training.data.source import laid_out

LOGGER = logging.getLogger(__name__)
# Part of the name of the folder of decoded rows: another layout never meets old files.
FILE_FORMAT = 3
ASIDE = ".decoding"
"""Beginning of the names of folders with half-written shards."""

FACTS = TypeAdapter(RowFacts)
OnProgress = Callable[[], None]
OnRows = Callable[[int, Int32Array, RowFacts], None]


class ShardStore(Protocol):
    """Rows of some shards as words, see `RowLayout`."""

    @property
    def facts(self) -> Mapping[int, RowFacts]:
        """Facts about each shard, in the order of their numbers."""

    def read(self, shard: int, starts: Int64Array, stops: Int64Array) -> Int32Array:
        """Words of increasing ranges of a shard's rows, end to end.

        Raises:
            TransientError: the rows cannot be read any more.
        """


class MemoryStore:
    """Rows in memory, in the parts in which they were decoded.

    Args:
        snapshot: where they are.
        window: which rows.
        shards: whose rows.
        on_progress: called after each row group.

    Raises:
        DataContractError: as `SnapshotFile.decode`.
    """

    def __init__(
        self,
        snapshot: SnapshotFile,
        window: TimeWindow,
        shards: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        self._layout = snapshot.layout
        self._facts = {shard: RowFacts.none_of(snapshot.columns) for shard in shards}
        self._parts: dict[int, list[Int32Array]] = {shard: [] for shard in shards}
        decode_shards(snapshot, window, shards, self._add, on_progress)

    def _add(self, shard: int, words: Int32Array, facts: RowFacts) -> None:
        self._parts[shard].append(words)
        self._facts[shard].add(facts)

    @property
    def facts(self) -> Mapping[int, RowFacts]:
        """Facts about each shard, in the order of their numbers."""
        return self._facts

    def read(self, shard: int, starts: Int64Array, stops: Int64Array) -> Int32Array:
        """Words of increasing ranges of a shard's rows, end to end."""
        rows = laid_out(starts, stops)
        read, begin = [np.empty((0, self._layout.width), dtype=np.int32)], 0
        for part in self._parts[shard]:
            first, last = np.searchsorted(rows, (begin, begin + len(part)))
            read.append(part[rows[first:last] - begin])
            begin += len(part)
        return np.concatenate(read)

    def take(self, shard: int) -> list[Int32Array]:
        """Hand over a shard's parts; the store does not have them afterwards."""
        return self._parts.pop(shard)


class FileStore:
    """Rows in one file for each shard, under `folder`; decodes those that are not there yet.

    Args:
        folder: on a local disk, shared by the ranks of a host.
        snapshot, window, shards, on_progress: as `MemoryStore`.

    Raises:
        DataContractError: as `SnapshotFile.decode`.
        StorageError: the disk has not enough space, or refused a write.
    """

    def __init__(
        self,
        folder: Path,
        snapshot: SnapshotFile,
        window: TimeWindow,
        shards: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        self._layout = snapshot.layout
        self._folder = folder / _identity(snapshot, window)
        with refused_writes_explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self._folder, ASIDE)  # before the space is measured
        self._facts = {shard: facts for shard in shards if (facts := self._finished(shard))}
        missing = [shard for shard in shards if shard not in self._facts]
        LOGGER.debug("%d of %d shards are decoded already", len(self._facts), len(shards))
        if missing:
            self._check_space(snapshot, window, missing)
            self._decode(snapshot, window, missing, on_progress)
            self._facts = {shard: self._facts[shard] for shard in shards}

    @property
    def facts(self) -> Mapping[int, RowFacts]:
        """Facts about each shard, in the order of their numbers."""
        return self._facts

    def read(self, shard: int, starts: Int64Array, stops: Int64Array) -> Int32Array:
        """Words of increasing ranges of a shard's rows, end to end.

        May be called from several threads at once.

        Raises:
            TransientError: the file was cut or removed, or the disk cannot read it.
        """
        words = np.empty((int((stops - starts).sum()), self._layout.width), dtype=np.int32)
        content, size, filled = words.reshape(-1).view(np.uint8).data, self._layout.row_bytes, 0
        with self._opened(shard) as descriptor:
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                end = filled + (stop - start) * size
                _read_fully(descriptor, content[filled:end], start * size)
                filled = end
        return words

    def expect(self, shard: int, starts: Int64Array, stops: Int64Array) -> None:
        """Tell the kernel that these rows are read next; returns at once.

        Raises:
            TransientError: the file was removed.
        """
        size = self._layout.row_bytes
        with self._opened(shard) as descriptor:
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                length = (stop - start) * size
                os.posix_fadvise(descriptor, start * size, length, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def _opened(self, shard: int) -> Iterator[int]:
        """A shard's file, opened for one use: there may be more shards than a process may open."""
        path = self._rows_path(shard)
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise TransientError(
                f"decoded rows of shard {shard} cannot be read from {path} ({exc}); they were "
                "there when training began. A new attempt decodes them again"
            ) from exc

    def _finished(self, shard: int) -> RowFacts | None:
        """Facts of a shard that was decoded before and whose file is whole."""
        try:
            facts = FACTS.validate_json(self._facts_path(shard).read_bytes())
            size = self._rows_path(shard).stat().st_size
        except FileNotFoundError:
            return None
        return facts if size == facts.num_rows * self._layout.row_bytes else None

    def _check_space(
        self, snapshot: SnapshotFile, window: TimeWindow, missing: Sequence[int]
    ) -> None:
        wanted = set(missing)
        num_bytes = self._layout.row_bytes * sum(
            group.num_rows * len(group.shards() & wanted) // len(group.shards())
            for group in snapshot.groups(window).values()
        )
        free = shutil.disk_usage(self._folder).free
        if free < num_bytes:
            raise StorageError(
                f"{self._folder} has {free / 2**20:,.0f} MiB free; decoded rows of {len(missing)} "
                f"shard(s) take {num_bytes / 2**20:,.0f} MiB. Nothing was written; free space, or "
                "set reading mode 'memory'"
            )

    def _decode(
        self,
        snapshot: SnapshotFile,
        window: TimeWindow,
        missing: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        """Write each shard's rows aside, then give them their names, the facts last."""
        facts = {shard: RowFacts.none_of(snapshot.columns) for shard in missing}
        with refused_writes_explained(self._folder), scratch_folder(ASIDE, self._folder) as aside:

            def add(shard: int, words: Int32Array, of_words: RowFacts) -> None:
                with (aside / str(shard)).open("ab") as file:
                    file.write(words.data)
                facts[shard].add(of_words)

            for shard in missing:
                (aside / str(shard)).touch()
            decode_shards(snapshot, window, missing, add, on_progress)
            for shard in missing:
                (aside / str(shard)).replace(self._rows_path(shard))
                write_atomically(self._facts_path(shard), FACTS.dump_json(facts[shard]))
        self._facts |= facts

    def _rows_path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.rows"

    def _facts_path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.json"


def decode_shards(
    snapshot: SnapshotFile,
    window: TimeWindow,
    shards: Sequence[int],
    on_rows: OnRows,
    on_progress: OnProgress,
) -> None:
    """Decode the rows of some shards that lie in the window, in the order of the snapshot.

    Raises:
        DataContractError: as `SnapshotFile.decode`.
    """
    wanted = set(shards)
    for number, group in snapshot.groups(window).items():
        if group.shards() & wanted:
            for shard, words, facts in snapshot.decode(number, group, shards, window):
                on_rows(shard, words, facts)
        on_progress()


def _identity(snapshot: SnapshotFile, window: TimeWindow) -> str:
    """Name of the folder of decoded rows: another snapshot, window or number of shards, another.

    Another start of the machine too: rows are not flushed to disk, so after a loss of power a file
    may have its size and not its content.
    """
    seen = snapshot.path.stat()
    return content_key(
        FILE_FORMAT,
        boot_id(),
        str(snapshot.path),
        seen.st_size,
        seen.st_mtime_ns,
        snapshot.columns,
        snapshot.layout.width,
        snapshot.num_shards,
        window,
    )


def _read_fully(descriptor: int, content: memoryview, offset: int) -> None:
    """Fill `content`; one call may return less than was asked for (2 GiB at most)."""
    while content:
        count = os.preadv(descriptor, [content], offset)
        if count == 0:
            raise OSError(f"it ends at byte {offset}")
        content, offset = content[count:], offset + count
