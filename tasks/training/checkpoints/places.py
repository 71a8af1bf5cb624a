"""Where the files of checkpoints are, behind one interface; and the local folder.

A file is whole under its name or absent, however its writer ends.

Checkpoints under a prefix of an S3 bucket, through Arrow's client.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from pyarrow.fs import AwsStandardS3RetryStrategy, FileSelector, FileType, S3FileSystem

from tasks.kernel.errors import StorageError, TransientError, refused_writes_explained
from tasks.kernel.files import flush_to_disk, replacing
from tasks.training.checkpoints.access import S3Access
from tasks.training.checkpoints.manifest import MANIFEST_NAME
from tasks.training.checkpoints.parts import CHUNK_BYTES, Reader


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


CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
S3_ATTEMPTS = 4
# In the text of an error, since pyarrow has no code for it: the service may answer later.
PASSING_S3_ERRORS = (
    "NETWORK_CONNECTION", "REQUEST_TIMEOUT", "SERVICE_UNAVAILABLE", "SLOW_DOWN", "THROTTLING",
    "INTERNAL_FAILURE", "HTTP status 500", "HTTP status 502", "HTTP status 503", "HTTP status 504",
)  # fmt: skip


class S3Place:
    """A prefix of a bucket. An object appears when its upload is complete, or never."""

    def __init__(self, prefix: str, access: S3Access) -> None:
        self._prefix = prefix
        self._s3 = S3FileSystem(
            **access.arguments(),
            connect_timeout=CONNECT_TIMEOUT_S,
            request_timeout=REQUEST_TIMEOUT_S,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=S3_ATTEMPTS),
        )

    def __str__(self) -> str:
        return f"s3://{self._prefix}"

    def list_files(self) -> set[str]:
        """Names of all objects below the prefix; there are no empty folders."""
        selector = FileSelector(self._prefix, recursive=True, allow_not_found=True)
        with _s3_errors_explained(str(self)):
            found = self._s3.get_file_info(selector)
            bucket = self._prefix.partition("/")[0]
            if not found and self._s3.get_file_info(bucket).type == FileType.NotFound:
                raise StorageError(
                    f"{self}: there is no bucket {bucket}; make it, or name another in the "
                    "configuration of checkpoints"
                )
        return {
            info.path.removeprefix(f"{self._prefix}/")
            for info in found
            if info.type == FileType.File
        }

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Upload; where it fails in between, a shorter object may appear, without a manifest."""
        path = f"{self._prefix}/{name}"
        with _s3_errors_explained(f"s3://{path}"), self._s3.open_output_stream(path) as stream:
            for chunk in chunks:
                stream.write(chunk)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        """Open an object for reading, a few megabytes a request."""
        path = f"{self._prefix}/{name}"
        with (
            _s3_errors_explained(f"s3://{path}"),
            self._s3.open_input_stream(path, buffer_size=CHUNK_BYTES) as stream,
        ):
            yield stream

    def in_use(self, folder: str) -> AbstractContextManager[None]:
        """Objects have no locks: a reader that is slower than two further checkpoints loses."""
        return nullcontext()

    def remove(self, folder: str) -> bool:
        """Remove all objects of a folder."""
        path = f"{self._prefix}/{folder}"
        with _s3_errors_explained(f"s3://{path}"):
            try:
                self._s3.delete_file(f"{path}/{MANIFEST_NAME}")
            except FileNotFoundError:
                pass  # it was never whole
            if self._s3.get_file_info(path).type != FileType.NotFound:
                self._s3.delete_dir(path)
        return True


@contextmanager
def _s3_errors_explained(place: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        reason = str(exc).partition(" (Request ID")[0]
        if any(passing in reason for passing in PASSING_S3_ERRORS):
            raise TransientError(
                f"{place}: the store does not answer ({reason}); expected an S3 service there. "
                "Earlier checkpoints are untouched; a new attempt goes on from the newest whole one"
            ) from exc
        raise StorageError(
            f"{place}: the store refused ({reason}); expected a bucket that the key may list, "
            "read, write and delete in. Earlier checkpoints are untouched; mend the address or the "
            "permissions and run again"
        ) from exc
