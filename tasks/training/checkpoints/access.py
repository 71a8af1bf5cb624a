"""How the ranks get at an S3 store: by a file that only its owner may read, never by environment.

The driver has the keys in `AWS_*` variables. Ranks are started with an allow-listed environment and
see nothing of it; the command line is open to everybody. So the driver writes the keys into a file
of mode 0600 in the run directory and removes it when the run ends. Where the driver has no keys in
its environment, none are written, and the ranks ask the usual chain: the credentials file under
HOME, then the machine's own role.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from tasks.kernel.errors import ConfigurationError, refused_writes_explained
from tasks.training.checkpoints.config import CheckpointConfig

FILE_NAME = "s3-access.json"
OWNER_ONLY = 0o600


class S3Access(BaseModel):
    """Arguments of `pyarrow.fs.S3FileSystem`; printed without the keys. Empty: its defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
            raise ConfigurationError(
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
    with refused_writes_explained(file):
        file.unlink(missing_ok=True)  # what a killed driver left
    if not config.bucket_and_prefix:
        yield
        return
    access = S3Access.of_driver(environment)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with (
            refused_writes_explained(file),
            os.fdopen(os.open(file, flags, OWNER_ONLY), "w") as stream,
        ):
            json.dump(access.arguments(), stream)
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
        raise ConfigurationError(
            f"{file} is not there; expected the address and the keys of the S3 service, which the "
            "driver writes for its ranks while they run"
        ) from exc
    except ValidationError as exc:
        # Without the cause: its text would show the keys.
        raise ConfigurationError(
            f"{file} is not what the driver writes there ({exc.error_count()} fault(s)); start the "
            "run again"
        ) from None
