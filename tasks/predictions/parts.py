"""Parts of the prediction log: written aside and renamed, listed, and replaced by others.

A process that writes holds a lock file in `writers/`; the kernel lets go of it however the process
ends. So what a killed process left aside is known by its name, and the next one removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.kernel.errors import StorageError, refused_writes_explained
from tasks.kernel.files import flush_to_disk, private_folder
from tasks.predictions.schema import (
    ASIDE,
    BATCH_ROWS,
    COMPUTE_US,
    EVENT_TIME,
    LATENCY_US,
    MERGED,
    PARTS,
    REPLACES,
    REQUEST_ID,
    SCORE,
    SUBJECT,
    TRACK,
    VERSION,
    log_root,
)

logger = logging.getLogger(__name__)

ROW_GROUP_ROWS = 65_536
_STATISTICS = [
    *(EVENT_TIME, VERSION, TRACK, SUBJECT, REQUEST_ID),
    *(SCORE, LATENCY_US, COMPUTE_US, BATCH_ROWS),
]
_COMPRESSION: dict[str, Any] = {"compression": "zstd", "compression_level": 1}
LOCK = ".lock"


class PartWriter:
    """Writes parts under names that no other process gives; to be closed.

    Raises:
        StorageError: the folder cannot be made or written.
    """

    def __init__(self, home: Path) -> None:
        self._root = log_root(home)
        self._token = secrets.token_hex(6)
        self._number = 0
        writers = self._root / "writers"
        with refused_writes_explained(self._root):
            private_folder(self._root)
            writers.mkdir(exist_ok=True)
            with locked(writers, exclusive=True):
                _remove_leftovers(self._root)
                self._file = writers / f"{self._token}.lock"
                self._lock = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the name back; what was written stays."""
        with suppress(OSError):
            self._file.unlink()
            os.close(self._lock)

    def write(self, table: pa.Table, folder: Path) -> Path:
        """Write rows as a new part, whole or not at all.

        Raises:
            OSError: the disk refused; nothing of it is left.
        """
        return self.write_batches(iter([table]), table.schema, folder)

    def write_batches(
        self,
        tables: Iterator[pa.Table],
        schema: pa.Schema,
        folder: Path,
        replaces: Sequence[str] | None = None,
    ) -> Path:
        """Write tables of one schema as one part, one after the other.

        Args:
            tables: each becomes a row group, or several.
            schema: of each.
            folder: of a day.
            replaces: names of the parts that the new one stands for.

        Raises:
            OSError: the disk refused; nothing of it is left.
        """
        name = self._name(PARTS if replaces is None else MERGED)
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{ASIDE}{self._token}-{name}"
        metadata = {REPLACES: ",".join(replaces).encode()} if replaces is not None else {}
        try:
            _write(tables, schema.with_metadata(metadata), aside)
            flush_to_disk(aside)
            aside.rename(folder / name)
        finally:
            aside.unlink(missing_ok=True)
        flush_to_disk(folder)
        return folder / name

    def _name(self, beginning: str) -> str:
        self._number += 1
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        return f"{beginning}{moment}-{self._token}-{self._number}.parquet"


def _write(tables: Iterator[pa.Table], schema: pa.Schema, file: Path) -> None:
    texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_dictionary(f.type)]
    repeated = [name for name in texts if name != REQUEST_ID]
    with pq.ParquetWriter(
        file,
        schema,
        use_dictionary=repeated or False,
        write_statistics=[name for name in _STATISTICS if name in schema.names],
        write_page_checksum=True,
        store_schema=False,  # or a text that came as a dictionary would be read as one
        **_COMPRESSION,
    ) as writer:
        if schema.metadata:
            writer.add_key_value_metadata(schema.metadata)
        for table in tables:
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)


def _remove_leftovers(root: Path) -> None:
    """Remove what processes that are gone left aside."""
    alive = set()
    for file in (root / "writers").glob("*.lock"):
        if file.name == LOCK:
            continue
        descriptor = os.open(file, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()
        except BlockingIOError:
            alive.add(file.name.removesuffix(".lock"))
        finally:
            os.close(descriptor)
    for aside in root.glob(f"model=*/day=*/{ASIDE}*"):
        if aside.name.removeprefix(ASIDE).split("-")[0] not in alive:
            logger.warning("%s was left by a process that is gone; removed", aside)
            aside.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, *, exclusive: bool, wait: bool = True) -> Iterator[bool]:
    """Hold a folder: readers together, or one process that rewrites parts alone.

    New parts need no lock. Yields False where it is held by others and `wait` is False, and where
    the folder does not exist.

    Raises:
        StorageError: a lock file cannot be made.
    """
    if not folder.is_dir():
        yield False
        return
    with refused_writes_explained(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def visible_parts(folder: Path) -> list[Path]:
    """Parts of a day that count, in order of their names: those that no other one replaces."""
    files = sorted(file for file in folder.glob("*.parquet") if not file.name.startswith("."))
    gone = replaced_by(files)
    return [file for file in files if file.name not in gone]


def replaced_by(files: Sequence[Path]) -> set[str]:
    """Names of the parts that others of these files stand for."""
    gone: set[str] = set()
    for file in files:
        if file.name.startswith(MERGED):
            told = _metadata(file).get(REPLACES, b"").decode()
            gone.update(name for name in told.split(",") if name)
    return gone


def _metadata(file: Path) -> Mapping[bytes, bytes]:
    """What a part says of itself; nothing where it cannot be read: then it replaces none."""
    try:
        return pq.read_metadata(file).metadata or {}
    except (OSError, pa.ArrowException):
        return {}


def replace_parts(
    writer: PartWriter,
    folder: Path,
    old: Sequence[Path],
    tables: Iterator[pa.Table],
    schema: pa.Schema,
) -> Path:
    """Put one part in the place of others; whoever reads meets the old ones or the new one.

    To be called with the model's folder held alone, and after `remove_replaced`.

    Raises:
        StorageError: the disk refused; the old parts are unchanged.
    """
    names = [file.name for file in old]
    try:
        made = writer.write_batches(tables, schema, folder, names)
    except OSError as exc:
        raise StorageError(
            f"{folder}: a part could not be written ({exc}); the {len(old)} parts that it was to "
            "replace are unchanged. Free space and run again"
        ) from exc
    for file in old:
        file.unlink()
    flush_to_disk(folder)
    return made


def remove_replaced(folder: Path) -> int:
    """Remove parts that were replaced when a process was killed; how many."""
    files = sorted(folder.glob("*.parquet"))
    gone = replaced_by(files)
    stale = [file for file in files if file.name in gone]
    for file in stale:
        file.unlink(missing_ok=True)
    return len(stale)
