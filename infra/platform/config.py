"""What the platform is configured to be, and the ports it gets.

Importing this module reads nothing.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from infra.platform.files import PlatformFiles
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import write_atomically

COORDINATOR = "coordinator"
DATABASE_URL = "FALAJ_PLATFORM_DATABASE_URL"
REDIS_URL = "FALAJ_PLATFORM_REDIS_URL"
MLFLOW_PASSWORD = "FALAJ_MLFLOW_PASSWORD"
REPORTS_HOME = "FALAJ_REPORTS_HOME"
PORTS = {
    "prefect": "port",
    "mlflow": "mlflow_port",
    "serving": "serving_port",
    "serving_grpc": "serving_grpc_port",
}
"""The configuration's field for the port of each service."""

Port = Annotated[int, Field(ge=0, le=65535)]


class PlatformConfig(BaseModel):
    """The configuration of one platform; the same for all its processes."""

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
        description="Address of the API for browsers behind a proxy; the UI, and links to it in "
        "messages, are at the same address without /api.",
    )
    public_mlflow_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s@/]+(/[^\s@]*)?$",
        description="Address of MLflow for browsers behind a proxy.",
    )
    port: Port = Field(default=4200, description="TCP port of Prefect's API and UI; 0: any free.")
    mlflow_port: Port = Field(default=5000, description="TCP port of MLflow; 0: any free.")
    serving_port: Port = Field(default=8000, description="The inference server's; 0: any free.")
    serving_grpc_port: Port = Field(default=8001, description="Its gRPC's; 0: any free.")
    serving: bool = Field(default=True, description="Run the inference server too.")
    password: bool = Field(default=True, description="Ask for a password on all addresses.")
    database_url_file: Path | None = Field(
        default=None, description=f"File with the PostgreSQL URL; {DATABASE_URL} comes first."
    )
    redis_url_file: Path | None = Field(
        default=None, description=f"File with the Redis URL; {REDIS_URL} comes first."
    )
    drain_limit_s: float = Field(
        default=600, ge=0, description="Seconds that `down` waits for runs to end."
    )
    stop_grace_s: float = Field(
        default=15, ge=1, le=300, description="Seconds from SIGTERM to SIGKILL for each process."
    )
    min_free_bytes: int = Field(
        default=2_000_000_000, ge=0, description="Free bytes of disk below which doctor warns."
    )
    deploying: str = Field(
        default="falaj deploy",
        pattern=r"^[A-Za-z_][A-Za-z0-9_. ]*$",
        description="Python module and command that make pools and deployments on a ready server.",
    )

    @field_validator("deploying", mode="before")
    @classmethod
    def _as_it_is_called_now(cls, value: str) -> str:
        """State of an earlier version names the module."""
        return "falaj deploy" if value == "infra.deploying" else value

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
        for name in PORTS.values():
            if (port := getattr(self, name)) and seen.setdefault(port, name) != name:
                raise ValueError(
                    f"{seen[port]} and {name} are both {port}; give one another number"
                )
        return self


def read_config(
    file: Path | None, options: Mapping[str, object], kept: Mapping[str, object] | None = None
) -> PlatformConfig:
    """The configuration of a YAML file, or else of the last start, with options over it.

    Args:
        file: replaces the options kept from earlier starts.
        options: of the command line; those that are None were not given.
        kept: options of the last start, see `kept_options`.

    Raises:
        ConfigurationError: the file cannot be read, or a field is unknown or out of bounds.
    """
    fields: dict[str, object] = dict(kept or {})
    if file:
        try:
            fields = yaml.safe_load(file.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
            reason = " ".join(str(exc).split())
            raise ConfigurationError(f"{file} cannot be read as YAML: {reason}") from exc
        if not isinstance(fields, dict):
            raise ConfigurationError(f"{file} must hold names and values such as `port: 4200`")
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return PlatformConfig.model_validate({**fields, **given})
    except ValidationError as exc:
        found = "; ".join(_fault(error) for error in exc.errors())
        raise ConfigurationError(f"{file or 'the platform'}: {found}") from exc


def _fault(error: ErrorDetails) -> str:
    """What is wrong with one field, and what is expected."""
    name = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        known = ", ".join(sorted(PlatformConfig.model_fields))
        return f"{name} is no setting of the platform; there are {known}"
    if error["type"] == "string_pattern_mismatch":
        message = f"{error['input']!r}; expected: {PlatformConfig.model_fields[name].description}"
    return f"{name}: {message}" if name else message


def kept_options(files: PlatformFiles) -> dict[str, object]:
    """What the platform was started with last, as far as it differs from the defaults."""
    return stored_config(files).model_dump(exclude_defaults=True)


def stored_config(files: PlatformFiles) -> PlatformConfig:
    """The configuration of the platform that runs, or ran last; the defaults before its first.

    Fields that an earlier version had, and this one does not, are left out.
    """
    try:
        stored = json.loads(files.config.read_text())
        known = {name: v for name, v in stored.items() if name in PlatformConfig.model_fields}
        return PlatformConfig.model_validate(known)
    except FileNotFoundError:
        return PlatformConfig()
    except (ValueError, AttributeError) as exc:
        raise ConfigurationError(
            f"{files.config} was changed and is no configuration any more; delete it"
        ) from exc


@dataclass(frozen=True)
class Ports:
    """The ports of one platform, and remarks on their choice."""

    prefect: int
    mlflow: int
    serving: int = 8000
    serving_grpc: int = 8001
    remarks: tuple[str, ...] = ()


def choose_ports(config: PlatformConfig, files: PlatformFiles) -> Ports:
    """Take the wanted ports; where one is taken, the one chosen last time, else any free one.

    The choice is kept for as long as the same port is wanted, so that addresses stay.
    """
    try:
        kept: dict[str, dict[str, int]] = json.loads(files.ports.read_text())
    except (FileNotFoundError, ValueError):
        kept = {}
    chosen: dict[str, int] = {}
    remarks = []
    for service, field in PORTS.items():
        wanted: int = getattr(config, field)
        earlier = kept.get(service, {})
        again = earlier.get("chosen", 0) if earlier.get("wanted") == wanted else 0
        candidates = [p for p in (again, wanted) if p and p not in chosen.values()]
        port = next((p for p in candidates if is_free(config.host, p)), 0)
        while not port or port in chosen.values():
            with socket.create_server((config.host, 0), family=_family(config.host)) as probe:
                port = int(probe.getsockname()[1])
        if wanted and port != wanted:
            taken = "was chosen earlier instead of" if port == again else "is used instead of"
            remarks.append(f"{service}: port {port} {taken} {wanted}, which was taken")
        chosen[service] = port
        kept[service] = {"wanted": wanted, "chosen": port}
    write_atomically(files.ports, json.dumps(kept))
    return Ports(**chosen, remarks=tuple(remarks))


def is_free(host: str, port: int) -> bool:
    """True where a server could listen on this port now."""
    try:
        with socket.create_server((host, port), family=_family(host)):
            return True
    except OSError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
