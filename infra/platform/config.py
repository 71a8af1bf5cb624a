"""What the platform is asked to be, and where its own files are.

Importing this module reads nothing.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from infra.orchestration.client import platform_folder
from tasks.kernel.errors import ConfigurationError

COORDINATOR = "coordinator"
DATABASE_URL = "FALAJ_PLATFORM_DATABASE_URL"
REDIS_URL = "FALAJ_PLATFORM_REDIS_URL"

Port = Annotated[int, Field(ge=0, le=65535)]


class PlatformConfig(BaseModel):
    """What one platform is asked to be; the same for all its processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Literal["embedded", "server"] = Field(
        default="embedded",
        description="embedded: SQLite, nothing else is needed; server: PostgreSQL and Redis.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="IP address to listen on; another than loopback opens the platform to others.",
    )
    public_host: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$",
        max_length=253,
        description="Name by which browsers reach this machine, such as falaj.example.org; "
        "default: host.",
    )
    public_api_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s@/]+(/[^\s@]*)?/api$",
        description="Address of the API for browsers, where a proxy stands before it; the UI, and "
        "links to it in messages, are at the same address without /api.",
    )
    public_mlflow_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s@/]+(/[^\s@]*)?$",
        description="Address of MLflow for browsers, where a proxy stands before it.",
    )
    port: Port = Field(
        default=4200, description="TCP port of Prefect's API and UI that is wanted; 0: any free."
    )
    mlflow_port: Port = Field(
        default=5000, description="TCP port of MLflow that is wanted; 0: any free."
    )
    serving_port: Port = Field(
        default=8000, description="TCP port of the inference server that is wanted; 0: any free."
    )
    serving_grpc_port: Port = Field(
        default=8001, description="TCP port of its gRPC that is wanted; 0: any free."
    )
    serving: bool = Field(default=True, description="Run the inference server too.")
    password: bool = Field(default=True, description="Ask for a password on all addresses.")
    database_url_file: Path | None = Field(
        default=None,
        description="File with the PostgreSQL URL; the environment variable "
        f"{DATABASE_URL} comes first.",
    )
    redis_url_file: Path | None = Field(
        default=None,
        description=f"File with the Redis URL; the environment variable {REDIS_URL} comes first.",
    )
    worker_query_s: float = Field(
        default=2, ge=1, le=60, description="Seconds between a worker's questions for new runs."
    )
    heartbeat_s: int = Field(
        default=30, ge=30, le=600, description="Seconds between the heartbeats of a flow run."
    )
    drain_limit_s: float = Field(
        default=600, ge=0, description="Seconds that going down waits for runs to end."
    )
    stop_grace_s: float = Field(
        default=15, ge=1, le=300, description="Seconds from SIGTERM to SIGKILL for each process."
    )
    log_limit_bytes: int = Field(
        default=10_000_000, ge=10_000, description="Bytes of a log file before it is rotated."
    )
    log_keep: int = Field(default=3, ge=1, le=100, description="Rotated files kept for each log.")
    min_free_bytes: int = Field(
        default=2_000_000_000, ge=0, description="Free bytes of disk below which doctor warns."
    )
    deploying: str = Field(
        default="infra.deploying",
        pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$",
        description="Python module that makes pools and deployments once the server is ready.",
    )

    @model_validator(mode="after")
    def _only_loopback_without_password(self) -> Self:
        try:
            address = ip_address(self.host)
        except ValueError as exc:
            raise ValueError(
                f"host={self.host!r} is no IP address; write 127.0.0.1 for this machine alone, "
                "0.0.0.0 for all its addresses"
            ) from exc
        if not self.password and not address.is_loopback:
            raise ValueError(
                f"host={self.host} without a password would let anybody run code here; keep the "
                "password on, or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _different_ports(self) -> Self:
        seen: dict[int, str] = {}
        for name in ("port", "mlflow_port", "serving_port", "serving_grpc_port"):
            port = getattr(self, name)
            if port and port in seen:
                raise ValueError(
                    f"{seen[port]} and {name} are both {port}; give one another number"
                )
            seen[port] = name
        return self


def read_config(
    file: Path | None, options: Mapping[str, object], kept: Mapping[str, object] | None = None
) -> PlatformConfig:
    """The configuration of a YAML file, or else of the last start, with options over it.

    Args:
        file: says all; what was chosen at earlier starts does not count beside it.
        options: of the command line; those that are None were not given.
        kept: options of the last start, see `kept_options`.

    Raises:
        ConfigurationError: the file cannot be read, or a field is unknown or out of bounds.
    """
    fields: dict[str, object] = dict(kept or {})
    if file:
        try:
            fields = yaml.safe_load(file.read_text()) or {}
        except (OSError, yaml.YAMLError) as exc:
            reason = " ".join(str(exc).split()) if isinstance(exc, yaml.YAMLError) else exc.strerror
            raise ConfigurationError(f"{file} cannot be read as YAML: {reason}") from exc
        if not isinstance(fields, dict):
            raise ConfigurationError(
                f"{file} holds {type(fields).__name__}, expected names and values such as "
                "`port: 4200`"
            )
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return PlatformConfig.model_validate({**fields, **given})
    except ValidationError as exc:
        found = "; ".join(_fault(error) for error in exc.errors())
        raise ConfigurationError(f"{file or 'the platform'}: {found}") from exc


def _fault(error: ErrorDetails) -> str:
    """What is wrong with one field, and what may stand there."""
    name = ".".join(map(str, error["loc"]))
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        known = ", ".join(sorted(PlatformConfig.model_fields))
        return f"{name} is no setting of the platform; there are {known}"
    if error["type"] == "string_pattern_mismatch":
        meaning = PlatformConfig.model_fields[name].description or said
        return f"{name}: {error['input']!r} is none; expected: {meaning}"
    return f"{name}: {said}" if name else said


def kept_options(place: Place) -> dict[str, object]:
    """What the platform was started with last, as far as it differs from the defaults."""
    return stored_config(place).model_dump(exclude_defaults=True)


@dataclass(frozen=True)
class Place:
    """Files of the platform of one state folder."""

    home: Path

    @property
    def folder(self) -> Path:
        """`<home>/platform`, readable by its owner alone."""
        return platform_folder(self.home)

    @property
    def lock(self) -> Path:
        """Held by the supervisor as long as it lives."""
        return self.folder / "lock"

    @property
    def start_lock(self) -> Path:
        """Held by `up` while it starts a supervisor."""
        return self.folder / "start_lock"

    @property
    def endpoint(self) -> Path:
        """Where the platform answers; see `infra.orchestration.client`."""
        return self.folder / "endpoint.json"

    @property
    def state(self) -> Path:
        """What the supervisor says of its services; see `infra.platform.state`."""
        return self.folder / "state.json"

    @property
    def ports(self) -> Path:
        """Ports chosen earlier."""
        return self.folder / "ports.json"

    @property
    def config(self) -> Path:
        """The configuration that the supervisor was started with."""
        return self.folder / "config.json"

    @property
    def paused(self) -> Path:
        """Pools that going down has paused, to be resumed when coming up."""
        return self.folder / "paused.json"

    @property
    def secret(self) -> Path:
        """The line `user:password`, mode 600."""
        return self.folder / "secret"

    @property
    def prefect(self) -> Path:
        """Prefect's own folder: database, results, leases."""
        return self.folder / "prefect"

    def log(self, service: str) -> Path:
        """Log of one service."""
        return self.folder / "logs" / f"{service}.log"

    def worker_name(self, pool: str) -> str:
        """Name of this platform's worker on a pool: the same after each start, unique among hosts.

        What a run says about its worker thus tells whose it is, also after a power cut.
        """
        digest = hashlib.sha256(str(self.home).encode()).hexdigest()[:6]
        return f"{pool}@{socket.gethostname()}-{digest}"


def stored_config(place: Place) -> PlatformConfig:
    """The configuration of the platform that runs, or ran last; the defaults before its first."""
    try:
        return PlatformConfig.model_validate_json(place.config.read_text())
    except FileNotFoundError:
        return PlatformConfig()
    except ValidationError as exc:
        raise ConfigurationError(
            f"{place.config} was changed and is no configuration any more; delete it"
        ) from exc
