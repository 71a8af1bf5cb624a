"""Where the files of checkpoints are, behind one interface; and the local folder.

A file is whole under its name or absent, however its writer ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from tasks.kernel.errors import StorageError, refused_writes_explained
from tasks.kernel.files import flush_to_disk, replacing
from tasks.training.checkpoints.manifest import MANIFEST_NAME
from tasks.training.checkpoints.parts import Reader


class Place(Protocol):
    """Folders of files. A name is `folder/file`; neither part holds a slash."""

    def list_files(self) -> set[str]:
        """Names of all files there, of ours and others'; of an empty folder, `folder/`."""

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write a file that survives a power cut; it appears whole.

        Raises:
            StorageError: the write was refused; nothing is under the name.
            TransientError: the store cannot be reached now.
        """

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading.

        Raises:
            FileNotFoundError: there is none.
        """

    def in_use(self, folder: str) -> AbstractContextManager[None]:
        """Keep a folder from being removed, as far as the place can, while the context lasts."""

    def remove(self, folder: str) -> bool:
        """Remove a folder, its manifest first; False where it is in use."""


class LocalPlace:
    """A folder of this host, or one that is mounted on all hosts."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def list_files(self) -> set[str]:
        """Names of all files; what is being written has one that begins with a dot."""
        found: set[str] = set()
        for path in self._root.glob("*"):
            if path.is_dir():
                found |= {f"{path.name}/{inside.name}" for inside in path.glob("*")} or {
                    f"{path.name}/"
                }
            else:
                found.add(path.name)
        return found

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write aside, flush to disk, rename, flush the folder."""
        path = self._root / name
        with _refusals_explained(path):
            with replacing(path) as aside, aside.open("wb", buffering=0) as stream:
                for chunk in chunks:
                    _write_all(stream.fileno(), chunk)
            if path.name == MANIFEST_NAME:
                flush_to_disk(self._root)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        """Open a file for reading."""
        with (self._root / name).open("rb") as stream:
            yield stream

    @contextmanager
    def in_use(self, folder: str) -> Iterator[None]:
        """Hold a shared lock on the manifest: every reader may, one that removes may not."""
        with (self._root / folder / MANIFEST_NAME).open("rb") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_SH)
            yield

    def remove(self, folder: str) -> bool:
        """Remove a folder unless somebody reads it."""
        path = self._root / folder
        with _refusals_explained(path):
            try:
                with (path / MANIFEST_NAME).open("rb") as manifest:
                    fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    (path / MANIFEST_NAME).unlink()
            except FileNotFoundError:
                pass  # it was never whole
            except BlockingIOError:
                return False
            if path.exists():
                shutil.rmtree(path)
        return True


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[os.write(descriptor, chunk) :]


@contextmanager
def _refusals_explained(path: Path) -> Iterator[None]:
    """Any refusal of the disk as a `StorageError`, a worn-out one's too."""
    try:
        with refused_writes_explained(path):
            yield
    except OSError as exc:
        raise StorageError(
            f"{path}: the disk refused a write ({exc.strerror or exc}); expected a writable folder "
            "with free space. Earlier checkpoints are untouched; mend the disk and run again"
        ) from exc
