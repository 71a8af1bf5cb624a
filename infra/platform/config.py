"""What the platform is configured to be, and the ports it gets.

Importing this module reads nothing.
"""

import json
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from infra.platform.files import PlatformFiles, read_ports
from infra.platform.scaling import ScalingRule
from tasks.governance.handling import Address
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml, write_atomically
from tasks.kernel.values import Described, checked

COORDINATOR, SERVING = "coordinator", "serving"
CONFIG_VARIABLE = "FALAJ_PLATFORM_CONFIG"
DATABASE_URL = "FALAJ_PLATFORM_DATABASE_URL"
REDIS_URL = "FALAJ_PLATFORM_REDIS_URL"
MLFLOW_PASSWORD = "FALAJ_MLFLOW_PASSWORD"
MLFLOW_SECRET = "mlflow-secret"
REPORTS_HOME = "FALAJ_REPORTS_HOME"
PORTS = {
    "prefect": "port",
    "mlflow": "mlflow_port",
    "serving": "serving_port",
    "serving_grpc": "serving_grpc_port",
}
"""The configuration's field for the port of each service."""
OPENBAO = "openbao"

Public = Annotated[str | None, Address("metadata")]
Port = Annotated[int, Field(ge=0, le=65535)]


class PlatformConfig(Described):
    """The configuration of one platform; the same for all its processes."""

    profile: Literal["embedded", "server"] = "embedded"
    """embedded: SQLite, nothing else is needed; server: PostgreSQL and Redis."""
    host: Annotated[str, Address("metadata")] = "127.0.0.1"
    """IP address to listen on; another than loopback opens the platform to others."""
    public_api_url: Public = Field(default=None, pattern=r"^https?://[^\s@/]+(/[^\s@]*)?/api$")
    """Address of the API for browsers on other machines, such as
    http://falaj.example.org:4200/api; the UI, and links to it in messages, are at the same
    address without /api."""
    api_url: Public = Field(default=None, pattern=r"^https?://[^\s@/]+(/[^\s@]*)?/api$")
    """Address of a balancer before the Prefect servers of several hosts with one database,
    Redis and password: workers and runs ask there, and go on while the server of their own
    host is away. None: they ask their own."""
    public_mlflow_url: Public = Field(default=None, pattern=r"^https?://[^\s@/]+(/[^\s@]*)?$")
    """Address of MLflow for browsers on other machines."""
    port: Port = Field(default=4200, description="TCP port of Prefect's API and UI; 0: any free.")
    mlflow_port: Port = Field(default=5000, description="TCP port of MLflow; 0: any free.")
    serving_port: Port = Field(default=8000, description="The inference server's; 0: any free.")
    serving_grpc_port: Port = Field(default=8001, description="Its gRPC's; 0: any free.")
    serving: bool = Field(default=True, description="Run the inference server too.")
    openbao: bool = Field(default=False, description="Run OpenBao: keys, sign-in, certificates.")
    openbao_port: Port = Field(default=8200, description="Its port, and the next one; 0: any free.")
    sign_in_urls: tuple[str, ...] = ()
    """Addresses of the gateway to which OpenBao sends people who signed in."""
    scaling: dict[str, ScalingRule] = Field(
        default={}, description="What there may be several of: `serving`, or workers by their pool."
    )
    password: bool = Field(default=True, description="Ask for a password on all addresses.")
    drain_limit_s: float = Field(default=600, ge=0)
    """Seconds that `down` waits for runs to end."""
    deploying: str = Field(default="falaj deploy", pattern=r"^[A-Za-z_][A-Za-z0-9_. ]*$")
    """Python module and command that make pools and deployments on a ready server."""

    @property
    def ports(self) -> dict[str, str]:
        """The field for the port of each service that is to run."""
        return PORTS | ({OPENBAO: "openbao_port"} if self.openbao else {})

    def rule(self, group: str) -> ScalingRule:
        """How many there are to be of a group: always one, where nothing else is said."""
        return self.scaling.get(group) or ScalingRule()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not ip_address(self.host).is_loopback and not self.password:
            raise ValueError(
                f"host={self.host} without a password would let anybody run code here; keep the "
                "password on, or listen on 127.0.0.1"
            )
        if not self.rule(SERVING).least:
            raise ValueError("scaling.serving.least is 0, and nothing would start it again: say 1")
        if self.api_url and self.profile == "embedded":
            raise ValueError(
                "api_url is for several servers on one database, and profile embedded has a SQLite "
                "file of its own; take profile server, or leave api_url out"
            )
        chosen = [port for name in self.ports.values() if (port := getattr(self, name))]
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{', '.join(self.ports.values())} must differ, and are {chosen}")
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
    given = {name: value for name, value in options.items() if value is not None}
    absent = f"{file} does not exist. Nothing was started"
    fields = read_yaml(file, str(file), absent) if file else kept or {}
    known = f"Fields are {', '.join(sorted(PlatformConfig.model_fields))}"
    return checked(PlatformConfig, {**fields, **given}, str(file or "the platform"), known)


def kept_options(files: PlatformFiles) -> dict[str, Any]:
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


def choose_ports(config: PlatformConfig, files: PlatformFiles) -> dict[str, int]:
    """The wanted ports; for 0 any free one, if possible that of the last start."""
    kept, chosen = read_ports(files), dict[str, int]()
    for service, field in config.ports.items():
        port: int = getattr(config, field) or kept.get(service, 0)
        while getattr(config, field) == 0 and not is_free(config.host, port, chosen.values()):
            with socket.create_server((config.host, 0), family=_family(config.host)) as probe:
                port = int(probe.getsockname()[1])
        chosen[service] = port
    write_atomically(files.ports, json.dumps(chosen))
    return chosen


def require_free_ports(config: PlatformConfig) -> None:
    """See that servers can listen where they are to.

    Raises:
        ConfigurationError: a port is taken.
    """
    for field in config.ports.values():
        port: int = getattr(config, field)
        if port and not is_free(config.host, port):
            raise ConfigurationError(
                f"{field}={port} is taken on {config.host}; give another number, or 0 for any "
                f"free one: --{field.replace('_', '-')} 0. Nothing was started"
            )


def is_free(host: str, port: int, given_away: Collection[int] = ()) -> bool:
    """True where a server could listen on this port now."""
    if not port or port in given_away:
        return False
    with suppress(OSError), socket.create_server((host, port), family=_family(host)):
        return True
    return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
