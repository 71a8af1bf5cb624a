"""Segments of the prediction log: written aside and renamed, listed, and replaced by others.

A process that writes holds a lock file in `writers/`; the kernel frees it however the process ends.
So what a killed process left aside is known by its name, and the next one removes it.
"""

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.kernel.errors import StorageError, TransientError, refused_writes_explained
from tasks.kernel.files import flush_to_disk, is_held, locked, private_folder
from tasks.kernel.settings import bring, children, drop, send
from tasks.metadata.database import held_everywhere
from tasks.predictions import schema as log

logger = logging.getLogger(__name__)

ROW_GROUP_ROWS = 65_536
_STATISTICS = [
    *(log.EVENT_TIME, log.VERSION, log.TRACK, log.SUBJECT, log.REQUEST_ID),
    *(log.SCORE, log.LATENCY_US, log.COMPUTE_US, log.BATCH_ROWS),
]
LOCK = ".lock"


class SegmentWriter:
    """Writes segments under names that no other process gives; to be closed.

    Raises:
        StorageError: the folder cannot be made or written.
    """

    def __init__(self, home: Path) -> None:
        self._token = secrets.token_hex(6)
        self._number = 0
        self._held = ExitStack()
        root = log.log_root(home)
        with refused_writes_explained(root):
            private_folder(root)
            self._file = root / "writers" / f"{self._token}.lock"
            with locked(self._file.with_name(LOCK)):
                _remove_leftovers(root)
                self._held.enter_context(locked(self._file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the name back; what was written stays."""
        self._file.unlink(missing_ok=True)
        self._held.close()

    def write(
        self,
        tables: Iterator[pa.Table],
        schema: pa.Schema,
        folder: Path,
        replaces: Sequence[str] | None = None,
    ) -> Path:
        """Write tables as a new segment, whole or not at all.

        Args:
            tables: each becomes a row group, or several.
            schema: of each.
            folder: of a day.
            replaces: names of the segments that the new one stands for.

        Raises:
            OSError: the disk refused; nothing of it is left.
        """
        self._number += 1
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        beginning = log.WRITTEN if replaces is None else log.MERGED
        name = f"{beginning}{moment}-{self._token}-{self._number}.parquet"
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{log.ASIDE}{self._token}-{name}"
        metadata = {log.REPLACES: ",".join(replaces).encode()} if replaces is not None else {}
        try:
            _write(tables, schema.with_metadata(metadata), aside)
            flush_to_disk(aside)
            send(aside, folder / name)
            aside.rename(folder / name)
        finally:
            aside.unlink(missing_ok=True)
        flush_to_disk(folder)
        return folder / name


def _write(tables: Iterator[pa.Table], schema: pa.Schema, file: Path) -> None:
    texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_dictionary(f.type)]
    repeated = [name for name in texts if name != log.REQUEST_ID]
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=repeated or False,
        write_statistics=[name for name in _STATISTICS if name in schema.names],
        write_page_checksum=True,
        store_schema=False,  # or a text that came as a dictionary would be read as one
    ) as writer:
        if schema.metadata:
            writer.add_key_value_metadata(schema.metadata)
        for table in tables:
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)


def _remove_leftovers(root: Path) -> None:
    """Remove what processes that are gone left aside."""
    alive = set()
    for file in (root / "writers").glob("?*.lock"):
        if is_held(file):
            alive.add(file.name.removesuffix(".lock"))
        else:
            file.unlink()
    for aside in root.glob(f"model=*/day=*/{log.ASIDE}*"):
        if aside.name.removeprefix(log.ASIDE).split("-")[0] not in alive:
            logger.warning("%s was left by a process that is gone; removed", aside)
            aside.unlink(missing_ok=True)


class _HeldByOthersError(TransientError):
    """A folder is in use."""


@contextmanager
def folder_held(folder: Path, *, exclusive: bool, wait: bool = True) -> Iterator[bool]:
    """Hold a model's folder: readers together, or one process that rewrites segments alone.

    New segments need no lock. Yields False where others hold it and `wait` is False, and where the
    folder does not exist.

    Raises:
        StorageError: a lock file cannot be made.
    """
    with ExitStack() as stack:
        is_held_here = folder.is_dir() or bool(children(folder))
        if is_held_here:
            wait_s = float("inf") if wait else 0.0
            hold = held_everywhere(
                folder / LOCK, shared=not exclusive, wait_s=wait_s, held=_HeldByOthersError
            )
            try:
                stack.enter_context(hold)
            except _HeldByOthersError:
                is_held_here = False
        yield is_held_here


def visible_segments(folder: Path) -> list[Path]:
    """Segments of a day that count, in order of their names: those that no other one replaces."""
    files, gone = _listed(folder)
    return [file for file in files if file.name not in gone]


def remove_replaced(folder: Path) -> None:
    """Remove segments that were replaced when a process was killed."""
    files, gone = _listed(folder)
    for file in files:
        if file.name in gone:
            drop(file)


def _listed(folder: Path) -> tuple[list[Path], set[str]]:
    """Segments of a day, and the names that others of them stand for."""
    bring(folder, exact=True)
    files = sorted(file for file in folder.glob("*.parquet") if not file.name.startswith("."))
    gone: set[str] = set()
    for file in files:
        if file.name.startswith(log.MERGED):
            try:
                metadata = pq.read_metadata(file).metadata or {}
            except (OSError, pa.ArrowException):
                continue  # of a damaged one nothing is known, so it replaces none
            gone.update(metadata.get(log.REPLACES, b"").decode().split(","))
    return files, gone


def replace_segments(
    writer: SegmentWriter,
    folder: Path,
    old: Sequence[Path],
    tables: Iterator[pa.Table],
    schema: pa.Schema,
) -> None:
    """Put one segment in the place of others; whoever reads meets the old ones or the new one.

    To be called with the model's folder held alone, and after `remove_replaced`.

    Raises:
        StorageError: the disk refused; the old segments are unchanged.
    """
    try:
        writer.write(tables, schema, folder, [file.name for file in old])
    except OSError as exc:
        raise StorageError(
            f"{folder}: a segment could not be written ({exc}); the {len(old)} that it was to "
            "replace are unchanged. Free space and run again"
        ) from exc
    for file in old:
        drop(file)
    flush_to_disk(folder)
