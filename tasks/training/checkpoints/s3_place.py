"""Checkpoints under a prefix of an S3 bucket, through Arrow's client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from pyarrow.fs import AwsStandardS3RetryStrategy, FileSelector, FileType, S3FileSystem

from tasks.kernel.errors import StorageError, TransientError
from tasks.training.checkpoints.access import S3Access
from tasks.training.checkpoints.manifest import MANIFEST_NAME
from tasks.training.checkpoints.parts import CHUNK_BYTES, Reader

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
