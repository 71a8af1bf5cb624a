"""What the edge does, as its owner says it, and where its files are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from infra.gateway.place import EdgePlace
from serving.security.config import Rate, SecurityConfig, read_security
from tasks.kernel.errors import ConfigurationError

Address = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Experiment(_Config):
    """An A/B test: requests with this header go to this slot, whatever the shares are."""

    header: str = Field(pattern=r"^[a-z0-9-]+$", description="In small letters.")
    value: str = Field(min_length=1, description="Exact value of the header.")
    slot: Literal["stable", "candidate"] = Field(description="What answers such a request.")

    @field_validator("header")
    @classmethod
    def _clients_may_send_it(cls, header: str) -> str:
        if header.startswith("x-falaj-"):
            raise ValueError(f"the edge removes {header} from what clients send; name another")
        return header


class ModelConfig(_Config):
    """A model that the edge lets through."""

    experiments: tuple[Experiment, ...] = Field(default=(), description="A/B by a header.")


class EdgeConfig(_Config):
    """The edge of one installation.

    Attributes:
        certificate: PEM file for clients, with its chain; None for one of a private authority.
        client_ca: authority of clients' certificates; None where clients have none.
        upstream_tls: False only for a server on the same machine's loopback device.
    """

    models: dict[ModelName, ModelConfig] = Field(
        min_length=1, description="Models that clients may ask; nothing else exists for them."
    )
    listen: Address = Field(default="127.0.0.1:8443", description="Where clients come.")
    hosts: tuple[str, ...] = Field(
        default=("localhost", "127.0.0.1"), description="Names in the certificate made here."
    )
    certificate: Path | None = None
    key: Path | None = Field(default=None, description="PEM file of its private key.")
    client_ca: Path | None = None
    http: tuple[Address, ...] = Field(
        default=("127.0.0.1:8000",), min_length=1, description="Servers over HTTP."
    )
    grpc: tuple[Address, ...] = Field(
        default=("127.0.0.1:8001",), min_length=1, description="The same over gRPC."
    )
    upstream_tls: bool = True
    limit: Rate = Field(default=Rate(), description="Of each subject of a token.")
    address_limit: Rate = Field(
        default=Rate(per_s=1000, burst=2000), description="Of each address, before anything else."
    )
    max_clients: PositiveInt = Field(
        default=10_000, description="Clients whose limits are remembered."
    )
    timeout_s: PositiveFloat = Field(default=30, description="Of one request.")
    max_connections: PositiveInt = Field(default=10_000, description="Of clients, at a time.")
    max_shadow_requests: PositiveInt = Field(
        default=64, description="Mirrored requests on their way; more are not sent."
    )
    workers: PositiveInt = Field(default=2, description="Envoy's threads.")
    traces: str | None = Field(
        default=None,
        pattern=r"^http://[^/@]+:[0-9]+/.*$",
        description="OTLP over HTTP, as http://127.0.0.1:4318/v1/traces.",
    )
    traced_share: float = Field(default=1.0, ge=0, le=1, description="Of requests, with traces.")
    access_log: Path | None = Field(default=None, description="None for standard output.")

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


@dataclass(frozen=True)
class EdgePlan:
    """All that Envoy's configuration is made from, except the shares."""

    place: EdgePlace
    config: EdgeConfig
    security: SecurityConfig


def read_plan(home: Path) -> EdgePlan:
    """The plan of a state folder.

    Raises:
        ConfigurationError: files are absent, or say what cannot be.
    """
    place = EdgePlace(home)
    config = _seen_from(_read(place.config_file), place.folder)
    security = (
        read_security(place.security_file) if place.security_file.exists() else SecurityConfig()
    )
    check_security(security, place.security_file)
    return EdgePlan(place, config, security)


def check_security(security: SecurityConfig, file: Path) -> None:
    """Refuse what the edge cannot hold.

    Raises:
        ConfigurationError: clients without names, or with secrets that Envoy would have to keep.
    """
    if security.anonymous:
        raise ConfigurationError(f"{file}: anonymous clients are for a server without an edge")
    if shared := [issuer.issuer for issuer in security.issuers if issuer.secret_file]:
        raise ConfigurationError(
            f"{file}: issuer {shared[0]} signs with a shared secret, which Envoy would have to "
            "keep in clear; let it sign with a private key and name its public keys"
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Parts of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _seen_from(config: EdgeConfig, folder: Path) -> EdgeConfig:
    """Paths in the file are seen from its folder."""
    paths = {name: getattr(config, name) for name in ("certificate", "key", "client_ca")}
    paths["access_log"] = config.access_log
    found = {name: folder / path for name, path in paths.items() if path is not None}
    return config.model_copy(update=found)


def _read(file: Path) -> EdgeConfig:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as exc:
        raise ConfigurationError(
            f"{file} cannot be read: {exc.strerror}. Write there at least "
            "`models: {flight-delay: {}}`, the models that clients may ask"
        ) from exc
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"{file} is no YAML: {exc}") from exc
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{file} holds no settings; expected at least `models:`")
    try:
        return EdgeConfig.model_validate(content)
    except ValidationError as exc:
        raise ConfigurationError(f"{file}: {exc}") from exc
