"""A disk for checkpoints that survive a power cut.

The kernel's `Location` of a folder flushes nothing, does not list what a killed writer left, and
cannot tell a worn-out sector from a store that is away for a moment.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.kernel.errors import ArtifactError, StorageError
from tasks.kernel.files import flush_to_disk, write_atomically


class Disk:
    """Folders of files on a disk that all ranks reach. A file's name is `folder/file`.

    A file is complete under its name or absent, however its writer ends.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def entries(self, prefix: str) -> set[str]:
        """Names of all files below, of ours and others'; of folders, `folder/`.

        Raises:
            StorageError: the disk refuses.
        """
        with self._refusals_explained(prefix):
            return {
                f"{path.relative_to(self._root)}{'/' if path.is_dir() else ''}"
                for path in (self._root / prefix).rglob("*")
            }

    def write(self, name: str, content: bytes) -> None:
        """Write a file that survives a power cut; it appears complete.

        Raises:
            StorageError: the write was refused; nothing is under the name.
        """
        path = self._root / name
        with self._refusals_explained(name):
            write_atomically(path, content)
            flush_to_disk(path.parent.parent)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none.

        Raises:
            ArtifactError: the disk cannot read it.
        """
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ArtifactError(f"it cannot be read ({exc.strerror or exc})") from exc

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and folders with all that is in them; what is gone is gone.

        Raises:
            StorageError: the disk refuses.
        """
        for name in names:
            with self._refusals_explained(name), suppress(FileNotFoundError):
                path = self._root / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def _refusals_explained(self, name: str) -> Iterator[None]:
        """Any refusal as an error of ours, a worn-out disk's too."""
        try:
            yield
        except OSError as exc:
            raise StorageError(
                f"{self}/{name}: the disk refused a write ({exc.strerror or exc}); expected a "
                "writable folder with free space. Earlier checkpoints are untouched; mend the "
                "disk and run again"
            ) from exc
