"""What the gateway is configured to do, where its files are, and the shares of traffic."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AliasChoices,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from infra.platform.files import PlatformFiles, read_ports
from serving.security.config import Rate, SecurityConfig, read_security
from tasks.contracts.serving import address_files, read_addresses
from tasks.governance.handling import Address
from tasks.governance.identity import SignIn, read_sign_in, sign_in_file
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml, write_atomically
from tasks.kernel.settings import USE_CASE_NAME
from tasks.kernel.values import Contract, Described, checked, seen_from

HostPort = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]
Listening = Annotated[HostPort, Address("predictions", prefix="https://")]
Servers = Annotated[tuple[HostPort, ...], Address("requests", prefix="https://")]
PlatformAddress = Annotated[HostPort, Address("metadata")]
Collector = Annotated[str | None, Address("traces")]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
UseCase = Annotated[str, Field(pattern=USE_CASE_NAME)]
ADMIN_SOCKET, AUTHORIZER_SOCKET = "admin.sock", "authorizer.sock"
"""In the gateway's folder, in which both processes run; a full path may be too long for them."""


class GatewayFiles:
    """Files of the gateway under a state folder.

    Attributes:
        folder: all of them; open to the owner alone.
        config_file: what its owner wrote.
        security_file: how server and gateway recognize clients, as the owner wrote it.
        server_security_file: the same for a server behind this gateway, with mutual TLS; made here.
        certificates: folder of certificates and keys.
        bootstrap: Envoy's first file; names the others.
        issuer_file: what the issuer of sign-ins said of itself last.
        session_key: signs people's sessions; without it, a new one is made, and all sessions end.
        shares_file: shares of candidates and mirrors; outlives everything but its folder.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "edge"
        self.config_file = self.folder / "edge.yaml"
        self.security_file = home / "serving" / "security.yaml"
        self.server_security_file = self.folder / "server-security.yaml"
        self.certificates = self.folder / "certificates"
        self.bootstrap = self.folder / "bootstrap.json"
        self.issuer_file = self.folder / "issuer.json"
        self.session_key = self.folder / "session-key"
        self.shares_file = self.folder / "shares.json"

    def resource(self, kind: str) -> Path:
        """A file that Envoy follows: `listeners`, `routes`, `clusters`, `secrets`, `sign-in-*`."""
        return self.folder / f"{kind}.json"


class Experiment(Contract):
    """An A/B test: requests with this header go to this track, whatever the shares are."""

    header: str = Field(pattern=r"^[a-z0-9-]+$", description="In small letters.")
    value: str = Field(min_length=1, description="Exact value of the header.")
    track: Literal["stable", "candidate"] = Field(
        validation_alias=AliasChoices("track", "slot"), description="What answers such a request."
    )

    @field_validator("header")
    @classmethod
    def _clients_may_send_it(cls, header: str) -> str:
        if header.startswith("x-falaj-"):
            raise ValueError(f"the gateway removes {header} from requests; name another")
        return header


class ModelConfig(Contract):
    """A model that the gateway lets through."""

    experiments: tuple[Experiment, ...] = Field(default=(), description="A/B by a header.")


class PlatformListener(Described):
    """The address of the platform: one for all that people and their programs look at."""

    listen: Annotated[HostPort, Address("metadata", prefix="https://")] = "127.0.0.1:8444"
    """Where people come."""
    address: str | None = Field(default=None, pattern=r"^https://[^\s@/]+$")
    """As browsers know it, such as https://falaj.example.org; None: the first of `hosts`, with the
    port of `listen`. The issuer has to know ADDRESS/sign-in/callback as one to come back to."""
    prefect: PlatformAddress | None = Field(default=None, description="None: the platform's here.")
    mlflow: PlatformAddress | None = Field(default=None, description="None: the platform's here.")
    features: dict[UseCase, Annotated[HostPort, Address("features")]] = Field(default_factory=dict)
    """Feature servers by use case."""


class GatewayConfig(Described):
    """The gateway of one installation.

    Attributes:
        certificate: PEM file for clients, with its chain; None for one of a private authority.
        client_ca: authority of clients' certificates; None where clients have none.
        upstream_tls: False only for a server on the same machine's loopback device.
    """

    models: dict[ModelName, ModelConfig] = Field(min_length=1)
    """Models that clients may call; nothing else exists for them."""
    listen: Listening = Field(default="127.0.0.1:8443", description="Where clients come.")
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1")
    """Names in the certificate made here."""
    certificate: Path | None = None
    key: Path | None = Field(default=None, description="PEM file of its private key.")
    client_ca: Path | None = None
    http: Servers = Field(default=("127.0.0.1:8000",), min_length=1)
    """Servers over HTTP, on any hosts; those on this machine that serve from the state
    folder are found without being named."""
    grpc: Servers = Field(default=("127.0.0.1:8001",), min_length=1)
    """The same over gRPC."""
    upstream_tls: bool = True
    platform: PlatformListener | None = Field(default=None, description="Needs sign-in.yaml.")
    limit: Rate = Field(default=Rate(), description="Of each subject of a token.")
    address_limit: Rate = Rate(per_s=1000, burst=2000)
    """Of each address, before anything else."""
    timeout_s: PositiveFloat = Field(default=30, description="Of one request.")
    workers: PositiveInt = Field(default=2, description="Envoy's threads.")
    traces: Collector = Field(default=None, pattern=r"^http://[^/@]+:[0-9]+/.*$")
    """OTLP over HTTP, as http://127.0.0.1:4318/v1/traces."""
    traced_share: float = Field(default=1.0, ge=0, le=1, description="Of requests, with traces.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("name both certificate and key, or none of them")
        away = [a for a in (*self.http, *self.grpc) if not a.startswith(("127.", "[::1]"))]
        if away and not self.upstream_tls:
            raise ValueError(
                f"{away[0]} is not on the loopback device, so upstream_tls cannot be off"
            )
        return self


class Shares(Contract):
    """How a model's traffic is split.

    Attributes:
        candidate: share that the candidate answers; the stable version answers the rest.
        mirror: share of requests that is sent to the shadow too, its answers thrown away.
        sticky: a client always gets the same version; a growing share keeps those it has.
    """

    candidate: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    mirror: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    sticky: bool = True


@dataclass(frozen=True)
class GatewayPlan:
    """All that Envoy's configuration is made from, except the shares.

    Attributes:
        announced: addresses of the serving processes on this machine, by protocol.
        sign_in: how people sign in; None where no listener `platform` is configured.
    """

    files: GatewayFiles
    config: GatewayConfig
    security: SecurityConfig
    announced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sign_in: SignIn | None = None

    @property
    def servers(self) -> dict[str, tuple[str, ...]]:
        """Addresses by protocol: those that the file names, and those of processes here."""
        found = {}
        for name in ("http", "grpc"):
            named, here = getattr(self.config, name), self.announced.get(name, ())
            # The default is for a server that is yet to start.
            both = (*named, *here) if name in self.config.model_fields_set else here or named
            found[name] = tuple(dict.fromkeys(both))
        return found

    @property
    def address(self) -> str:
        """Where browsers find the listener `platform`."""
        platform = self.config.platform or PlatformListener()
        port = platform.listen.rpartition(":")[2]
        return platform.address or f"https://{self.config.hosts[0]}:{port}"

    @property
    def upstreams(self) -> dict[str, str]:
        """Addresses of what is behind the platform's listener, by its cluster."""
        platform = self.config.platform
        if platform is None:
            return {}
        ports = read_ports(PlatformFiles(self.files.home))
        found = {
            "prefect": platform.prefect or f"127.0.0.1:{ports.get('prefect', 4200)}",
            "mlflow": platform.mlflow or f"127.0.0.1:{ports.get('mlflow', 5000)}",
        }
        if admin := self.announced.get("admin"):
            found["serving"] = admin[0]
        return found | {f"features-{name}": at for name, at in platform.features.items()}


def read_plan(home: Path) -> GatewayPlan:
    """The plan of a state folder.

    Raises:
        ConfigurationError: files are absent or wrong.
    """
    files = GatewayFiles(home)
    config = seen_from(files.folder, _read(files.config_file))
    file = files.security_file
    security = read_security(file) if file.exists() else SecurityConfig()
    if security.anonymous:
        raise ConfigurationError(f"{file}: anonymous clients are for a server without a gateway")
    sign_in = read_sign_in(home) if config.platform else None
    if config.platform and sign_in is None:
        raise ConfigurationError(
            f"{files.config_file} has a listener `platform`, and {sign_in_file(home)} does not "
            "exist: nobody could sign in. Name the issuer there, or take `platform` away"
        )
    return GatewayPlan(files, config, security, announced_servers(home), sign_in)


def has_platform_listener(home: Path) -> bool:
    """True where the gateway has the platform behind it, so that people sign in.

    Raises:
        ConfigurationError: its file says what cannot be.
    """
    file = GatewayFiles(home).config_file
    return file.is_file() and _read(file).platform is not None


def announced_servers(home: Path) -> dict[str, tuple[str, ...]]:
    """Addresses of the serving processes on this machine, by protocol.

    One that was killed stays among them until it is started again: Envoy finds out by itself.
    """
    read = [found for file in address_files(home) if (found := read_addresses(file))]
    return {
        name: tuple(str(one[name]).rpartition("/")[2] for one in read if one.get(name))
        for name in ("http", "grpc", "admin")
    }


def _read(file: Path) -> GatewayConfig:
    absent = (
        f"{file} cannot be read: No such file or directory. Write there at least "
        "`models: {flight-delay: {}}`, the models that clients may call"
    )
    content = read_yaml(file, str(file), absent)
    return checked(GatewayConfig, content, str(file), "Nothing was changed")


_ALL = TypeAdapter(dict[str, Shares])


def read_shares(file: Path) -> Mapping[str, Shares]:
    """Shares by model; none where nothing was ever set.

    Raises:
        ConfigurationError: the file was changed and holds no shares.
    """
    try:
        return _ALL.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as exc:
        raise ConfigurationError(f"{file} holds no shares: {exc}") from exc


def write_shares(file: Path, shares: Mapping[str, Shares]) -> None:
    """Replace the file."""
    write_atomically(file, _ALL.dump_json(dict(shares), indent=1).decode() + "\n")
