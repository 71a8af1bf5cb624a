"""Where the files of checkpoints are: a folder, or a prefix of an S3 bucket, through Arrow.

A file is complete under its name or absent, however its writer ends.

Ranks get at S3 by a file of mode 0600 in the run directory, never by environment or command line:
the driver writes the keys of its `AWS_*` variables into it and removes it when the run ends. Where
it has none, the ranks ask the usual chain: the credentials file under HOME, the machine's own role.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from pyarrow.fs import (
    AwsStandardS3RetryStrategy,
    FileInfo,
    FileSelector,
    FileType,
    LocalFileSystem,
    S3FileSystem,
)
from pydantic import SecretStr, ValidationError

from tasks.contracts.base import Contract
from tasks.kernel import errors
from tasks.kernel.files import flush_to_disk, replacing, write_atomically
from tasks.training.config import CheckpointConfig

FILE_NAME = "s3-access.json"


CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
S3_ATTEMPTS = 4
# In the text of an error, since pyarrow has no code for it: the service may answer later.
PASSING_S3_ERRORS = (
    "NETWORK_CONNECTION", "REQUEST_TIMEOUT", "SERVICE_UNAVAILABLE", "SLOW_DOWN", "THROTTLING",
    "INTERNAL_FAILURE", "HTTP status 500", "HTTP status 502", "HTTP status 503", "HTTP status 504",
)  # fmt: skip


class S3Access(Contract):
    """Arguments of `pyarrow.fs.S3FileSystem`; printed without the keys. Empty: its defaults."""

    endpoint_override: str = ""
    region: str = ""
    access_key: str = ""
    secret_key: SecretStr = SecretStr("")
    session_token: SecretStr = SecretStr("")

    @classmethod
    def of_driver(cls, environment: Mapping[str, str]) -> Self:
        """What the usual variables name.

        Raises:
            ConfigurationError: there is a key without its secret.
        """

        def first(*names: str) -> str:
            return next((environment[name] for name in names if environment.get(name)), "")

        key, secret = first("AWS_ACCESS_KEY_ID"), first("AWS_SECRET_ACCESS_KEY")
        if bool(key) != bool(secret):
            raise errors.ConfigurationError(
                "one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set, the other is not; set "
                "both, or neither to use the credentials file or the machine's role. Nothing was "
                "started"
            )
        return cls(
            endpoint_override=first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
            region=first("AWS_REGION", "AWS_DEFAULT_REGION"),
            access_key=key,
            secret_key=SecretStr(secret),
            session_token=SecretStr(first("AWS_SESSION_TOKEN")),
        )

    def arguments(self) -> dict[str, Any]:
        """The arguments that are given, keys among them."""
        values = ((n, v.get_secret_value() if isinstance(v, SecretStr) else v) for n, v in self)
        return {name: value for name, value in values if value}


@contextmanager
def access_handed_over(
    config: CheckpointConfig, run_path: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    """Driver: give the ranks what they need to reach the store, while the context lasts.

    Writes nothing where the checkpoints are on a disk.

    Raises:
        ConfigurationError: there is a key without its secret.
        StorageError: the disk refused the write.
    """
    file = run_path / FILE_NAME
    with errors.refused_writes_explained(file):
        file.unlink(missing_ok=True)  # what a killed driver left
    if not config.bucket_and_prefix:
        yield
        return
    access = S3Access.of_driver(environment)
    try:
        write_atomically(file, json.dumps(access.arguments()), private=True)
        yield
    finally:
        file.unlink(missing_ok=True)


def read_access(run_path: Path) -> S3Access:
    """Rank: what the driver has handed over.

    Raises:
        ConfigurationError: it has not, or the file is not the driver's.
    """
    file = run_path / FILE_NAME
    try:
        return S3Access.model_validate_json(file.read_text())
    except FileNotFoundError as exc:
        raise errors.ConfigurationError(
            f"{file} is not there; expected the address and the keys of the S3 service, which the "
            "driver writes for its ranks while they run"
        ) from exc
    except ValidationError as exc:
        # Without the cause: its text would show the keys.
        raise errors.ConfigurationError(
            f"{file} is not what the driver writes there ({exc.error_count()} fault(s)); start the "
            "run again"
        ) from None


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
        """Any refusal as an error of ours, a worn-out disk's too."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise self._refusal(name, exc) from exc

    def _refusal(self, name: str, error: OSError) -> errors.FalajError:
        return errors.StorageError(
            f"{self}/{name}: the disk refused a write ({error.strerror or error}); expected a "
            "writable folder with free space. Earlier checkpoints are untouched; mend the disk "
            "and run again"
        )


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
            raise errors.StorageError(
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

    def _refusal(self, name: str, error: OSError) -> errors.FalajError:
        reason = str(error).partition(" (Request ID")[0]
        if any(passing in reason for passing in PASSING_S3_ERRORS):
            return errors.TransientError(
                f"{self}/{name}: the store does not answer ({reason}); expected an S3 service "
                "there. Earlier checkpoints are untouched; a new attempt resumes from the "
                "newest complete one"
            )
        return errors.StorageError(
            f"{self}/{name}: the store refused ({reason}); expected a bucket that the key may "
            "list, read, write and delete in. Earlier checkpoints are untouched; mend the "
            "address or the permissions and run again"
        )
