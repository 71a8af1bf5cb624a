"""Where the files of checkpoints are: a folder, or a prefix of an S3 bucket, through Arrow.

A file is complete under its name or absent, however its writer ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyarrow.fs import (
    AwsStandardS3RetryStrategy,
    FileInfo,
    FileSelector,
    FileType,
    LocalFileSystem,
    S3FileSystem,
)

from tasks.kernel.errors import StorageError, TransientError
from tasks.kernel.files import flush_to_disk, replacing
from tasks.training.checkpoints.access import S3Access

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
S3_ATTEMPTS = 4
# In the text of an error, since pyarrow has no code for it: the service may answer later.
PASSING_S3_ERRORS = (
    "NETWORK_CONNECTION", "REQUEST_TIMEOUT", "SERVICE_UNAVAILABLE", "SLOW_DOWN", "THROTTLING",
    "INTERNAL_FAILURE", "HTTP status 500", "HTTP status 502", "HTTP status 503", "HTTP status 504",
)  # fmt: skip


class Location:
    """Folders of files on a disk that all ranks reach. A file's name is `folder/file`."""

    def __init__(self, root: str | Path) -> None:
        self._root = str(root)
        self._files = LocalFileSystem()

    def __str__(self) -> str:
        return self._root

    def list_files(self) -> set[str]:
        """Names of all files, of ours and others'; of an empty folder, `folder/`.

        Raises:
            TransientError: the store cannot be reached now.
            StorageError: it refuses.
        """
        with self._refusals_explained(""):
            selector = FileSelector(self._root, recursive=True, allow_not_found=True)
            return {self._name(info) for info in self._files.get_file_info(selector)}

    def _name(self, info: FileInfo) -> str:
        name = str(info.path).removeprefix(f"{self._root}/")
        return f"{name}/" if info.type == FileType.Directory else name

    def write(self, name: str, content: bytes) -> None:
        """Write a file that survives a power cut; it appears complete.

        Raises:
            StorageError: the write was refused; nothing is under the name.
            TransientError: the store cannot be reached now.
        """
        path = Path(self._root, name)
        with self._refusals_explained(name), replacing(path) as aside:
            aside.write_bytes(content)
        with self._refusals_explained(name):
            flush_to_disk(path.parent.parent)

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: there is none.
            OSError: the disk cannot read it.
            TransientError, StorageError: as `list_files`.
        """
        return Path(self._root, name).read_bytes()

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder, the file `first` before all others.

        Raises:
            StorageError, TransientError: as `write`.
        """
        path = f"{self._root}/{folder}"
        with self._refusals_explained(folder), suppress(FileNotFoundError):
            with suppress(FileNotFoundError):
                self._files.delete_file(f"{path}/{first}")
            self._files.delete_dir(path)

    @contextmanager
    def _refusals_explained(self, name: str) -> Iterator[None]:
        """Any refusal of the disk as a `StorageError`, a worn-out one's too."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise StorageError(
                f"{self}/{name}: the disk refused a write ({exc.strerror or exc}); expected a "
                "writable folder with free space. Earlier checkpoints are untouched; mend the disk "
                "and run again"
            ) from exc


class S3Location(Location):
    """A prefix of a bucket. An object appears when its upload is complete, or never."""

    def __init__(self, prefix: str, access: S3Access) -> None:
        super().__init__(prefix)
        self._files = S3FileSystem(
            **access.arguments(),
            connect_timeout=CONNECT_TIMEOUT_S,
            request_timeout=REQUEST_TIMEOUT_S,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=S3_ATTEMPTS),
        )

    def __str__(self) -> str:
        return f"s3://{self._root}"

    def list_files(self) -> set[str]:
        """Names of all objects; see `Location`."""
        found = super().list_files()
        bucket = self._root.partition("/")[0]
        with self._refusals_explained(""):
            is_missing = self._files.get_file_info(bucket).type == FileType.NotFound
        if is_missing:
            raise StorageError(
                f"{self}: there is no bucket {bucket}; make it, or name another in the "
                "configuration of checkpoints"
            )
        return found

    def write(self, name: str, content: bytes) -> None:
        """Upload; where it fails in between, a shorter object may appear, without a manifest."""
        with (
            self._refusals_explained(name),
            self._files.open_output_stream(f"{self._root}/{name}") as stream,
        ):
            stream.write(content)

    def read(self, name: str) -> bytes:
        """The content of an object; see `Location`."""
        with (
            self._refusals_explained(name),
            self._files.open_input_stream(f"{self._root}/{name}") as stream,
        ):
            return bytes(stream.read())

    @contextmanager
    def _refusals_explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as exc:
            reason = str(exc).partition(" (Request ID")[0]
            if any(passing in reason for passing in PASSING_S3_ERRORS):
                raise TransientError(
                    f"{self}/{name}: the store does not answer ({reason}); expected an S3 service "
                    "there. Earlier checkpoints are untouched; a new attempt resumes from the "
                    "newest complete one"
                ) from exc
            raise StorageError(
                f"{self}/{name}: the store refused ({reason}); expected a bucket that the key may "
                "list, read, write and delete in. Earlier checkpoints are untouched; mend the "
                "address or the permissions and run again"
            ) from exc
