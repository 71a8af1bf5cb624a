"""Decoded rows of a rank's shards in files, and the one pass that decodes them.

Files are written once on a host and found again: by a rank that takes over a shard, and by a run
that resumes after a crash. Where memory is free, the kernel keeps them there. They are read with
`pread`, not mapped: what the kernel caches of them is not memory of this process, and gives way
when memory is short.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import TransientError, refused_writes_explained
from tasks.kernel.files import remove_abandoned, scratch_folder, write_atomically
from tasks.kernel.process import boot_id
from tasks.kernel.settings import content_key
from tasks.training.data.decode import RowFacts, SnapshotFile
from tasks.training.data.preprocess import Int32Array, Int64Array

LOGGER = logging.getLogger(__name__)
# Part of the name of the folder of decoded rows: another layout never meets old files.
FILE_FORMAT = 3
ASIDE = ".decoding"
"""Beginning of the names of folders with half-written shards."""
FACTS = TypeAdapter(RowFacts)


class RowStore:
    """Rows of some shards as words, see `RowLayout`; decodes those that are not there yet.

    Args:
        folder: on a local disk, shared by the ranks of a host; a file for each shard goes there.
        snapshot: where the rows are.
        window: which rows.
        shards: whose rows.
        on_progress: called after each row group.

    Raises:
        DataContractError, ArtifactError, TransientError: as `SnapshotFile.decode`.
        StorageError: the disk refused a write.
    """

    def __init__(
        self,
        folder: Path,
        snapshot: SnapshotFile,
        window: TimeWindow,
        shards: Sequence[int],
        on_progress: Callable[[], None],
    ) -> None:
        self.layout = snapshot.layout
        self._folder = folder / _identity(snapshot, window)
        with refused_writes_explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self._folder, ASIDE)
        found = {shard: facts for shard in shards if (facts := self._finished(shard))}
        LOGGER.debug("%d of %d shards are decoded already", len(found), len(shards))
        missing = [shard for shard in shards if shard not in found]
        if missing:
            found |= self._decode(snapshot, window, missing, on_progress)
        self.facts = {shard: found[shard] for shard in shards}
        """Facts about each shard, in the order of their numbers."""

    def read(self, shard: int, starts: Int64Array, stops: Int64Array) -> Int32Array:
        """Words of increasing ranges of a shard's rows, end to end.

        May be called from several threads at once.

        Raises:
            TransientError: the file was cut or removed, or the disk cannot read it.
        """
        words = np.empty((int((stops - starts).sum()), self.layout.width), dtype=np.int32)
        content, size, filled = words.reshape(-1).view(np.uint8).data, self.layout.row_bytes, 0
        with self._opened(shard) as descriptor:
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                end = filled + (stop - start) * size
                _read_fully(descriptor, content[filled:end], start * size)
                filled = end
        return words

    def expect(self, shard: int, starts: Int64Array, stops: Int64Array) -> None:
        """Announce to the kernel that these rows are read next; returns at once.

        Raises:
            TransientError: the file was removed.
        """
        size = self.layout.row_bytes
        with self._opened(shard) as descriptor:
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                length = (stop - start) * size
                os.posix_fadvise(descriptor, start * size, length, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def _opened(self, shard: int) -> Iterator[int]:
        """A shard's file, opened for one use: there may be more shards than a process may open."""
        path = self._rows_path(shard)
        try:
            with path.open("rb", buffering=0) as file:
                yield file.fileno()
        except OSError as exc:
            raise TransientError(
                f"decoded rows of shard {shard} cannot be read from {path} ({exc}); they were "
                "there when training began. A new attempt decodes them again"
            ) from exc

    def _finished(self, shard: int) -> RowFacts | None:
        """Facts of a shard that was decoded before and whose file is complete."""
        try:
            facts = FACTS.validate_json(self._facts_path(shard).read_bytes())
            size = self._rows_path(shard).stat().st_size
        except FileNotFoundError:
            return None
        return facts if size == facts.num_rows * self.layout.row_bytes else None

    def _decode(
        self,
        snapshot: SnapshotFile,
        window: TimeWindow,
        missing: Sequence[int],
        on_progress: Callable[[], None],
    ) -> dict[int, RowFacts]:
        """Write each shard's rows aside, then give them their names, the facts last."""
        facts = {shard: RowFacts.none_of(snapshot.columns) for shard in missing}
        with refused_writes_explained(self._folder), scratch_folder(ASIDE, self._folder) as aside:
            for shard in missing:
                (aside / str(shard)).touch()
            for number, group in snapshot.groups(window).items():
                for shard, words, of_words in snapshot.decode(number, group, missing, window):
                    with (aside / str(shard)).open("ab") as file:
                        file.write(words.data)
                    facts[shard].add(of_words)
                on_progress()
            for shard in missing:
                (aside / str(shard)).replace(self._rows_path(shard))
                write_atomically(self._facts_path(shard), FACTS.dump_json(facts[shard]))
        return facts

    def _rows_path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.rows"

    def _facts_path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.json"


def _identity(snapshot: SnapshotFile, window: TimeWindow) -> str:
    """Name of the folder of decoded rows: another snapshot, window or number of shards, another.

    Another start of the machine too: rows are not flushed to disk, so after a loss of power a file
    may have its size and not its content.
    """
    return content_key(
        FILE_FORMAT,
        boot_id(),
        *snapshot.identity,
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
