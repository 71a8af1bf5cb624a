"""What a serving process believes about its clients: issuers, keys, owners of models, limits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.values import checked, is_loopback, seen_from

GRANT = r"^(infer|read|admin):(\*|[A-Za-z0-9._-]+)$"
Grant = Annotated[str, Field(pattern=GRANT)]
"""An action and the model on which it is allowed, as `infer:flight-delay` or `read:*`."""
Roles = Mapping[str, frozenset[str]]
MOST_KNOWN = 20_000
"""Principals, refused credentials and buckets that are remembered: some megabytes."""
SECURITY_FILE = Path("serving") / "security.yaml"
"""In the state folder: issuers, owners and keys are of an installation, not of its code."""
KEYS_FILE = Path("serving") / "secrets" / "api-keys.json"


class _Config(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class IssuerConfig(_Config):
    """Whoever signs tokens, and how their claims are read.

    Attributes:
        keys: file with a JSON Web Key Set, or its URL: https, or http on the loopback device.
        ca_file: authority that vouches for an https URL; None for the system's.
        roles_claim: where roles stand; dots step into objects, as `realm_access.roles`.
        tenant_claim: where the tenant stands; a token without it is then refused.
        tenant: of all tokens, where no claim says it; empty for operators of the installation.
    """

    issuer: str = Field(min_length=1, description="Exact value of the claim `iss`.")
    audience: str = Field(min_length=1, description="Value that the claim `aud` must hold.")
    keys: str = Field(min_length=1, description="JWKS of public keys: file or URL.")
    ca_file: Path | None = None
    roles_claim: str = "roles"
    tenant_claim: str | None = None
    tenant: str = ""
    refresh_s: PositiveFloat = Field(default=300, description="Age at which keys are read again.")

    @model_validator(mode="after")
    def _is_one_place(self) -> Self:
        check_address(self.keys)
        if self.tenant_claim is not None and self.tenant:
            raise ValueError(f"issuer {self.issuer}: name either `tenant_claim` or `tenant`")
        return self

    @property
    def is_remote(self) -> bool:
        """True where keys come from a URL."""
        return "://" in self.keys


class SecuritySection(_Config):
    """Section `security` of serving.yaml. Clients are described in the state folder."""

    edge: bool = Field(default=False, description="Answer the edge of this state folder alone.")


class Rate(_Config):
    """A token bucket: it holds `burst` requests and fills with `per_s`."""

    per_s: PositiveFloat = Field(default=200, description="Requests a second, lasting.")
    burst: PositiveInt = Field(default=400, description="Requests at once, after a rest.")


FAILURES = Rate(per_s=1, burst=20)
"""Refused credentials of one address."""


class LimitsConfig(_Config):
    """How often clients may come; what is remembered of them is bounded."""

    client: Rate = Rate()
    by_subject: dict[str, Rate] = Field(default_factory=dict)
    """Instead of `client`, by `subject` or `tenant/subject`."""


class TlsConfig(_Config):
    """TLS of a listener: 1.3 or nothing."""

    certificate: Path = Field(description="PEM file, with its chain.")
    key: Path = Field(description="PEM file of its private key.")
    client_ca: Path | None = None
    """Authority of clients: every one then needs a certificate."""


class SecurityConfig(_Config):
    """Who may ask a serving process for what.

    Attributes:
        api_keys: file of digests, made by `falaj keys`; None for no keys.
        certificates: grants by the subject of a client's certificate, as the edge tells it
            (RFC 2253, as `CN=batch,O=acme`). A server without an edge refuses to start with them.
        certificate_tenants: tenant of such a subject.
        behind_edge: only the edge can connect (mutual TLS), so its headers about certificate
            and address of the client are believed.
        grants: what a role of a token stands for, where it is no grant itself.
        owners: tenant that a model belongs to; others are refused. Those without are shared.
        anonymous: grants of whoever presents nothing; for the loopback device only.
    """

    issuers: tuple[IssuerConfig, ...] = Field(default=(), description="Who signs tokens.")
    api_keys: Path | None = None
    certificates: dict[str, tuple[Grant, ...]] = Field(default_factory=dict)
    certificate_tenants: dict[str, str] = Field(default_factory=dict)
    behind_edge: bool = False
    grants: dict[str, tuple[Grant, ...]] = Field(default_factory=dict)
    owners: dict[str, str] = Field(default_factory=dict)
    anonymous: tuple[Grant, ...] = ()
    limits: LimitsConfig = LimitsConfig()
    max_body_bytes: PositiveInt = 16 * 2**20
    """Of a request, at the edge; a server has `http.max_body_bytes`."""
    tls: TlsConfig | None = Field(default=None, description="TLS 1.3; None speaks in clear.")

    @model_validator(mode="after")
    def _edge_is_proven(self) -> Self:
        proven = self.tls is not None and self.tls.client_ca is not None
        if self.behind_edge and not proven:
            raise ValueError(
                "behind_edge needs tls with client_ca: without mutual TLS anybody could claim "
                "to be the edge and name any certificate"
            )
        if self.behind_edge and self.anonymous:
            raise ValueError("anonymous is for the loopback device only; the edge opens it to all")
        names = [issuer.issuer for issuer in self.issuers]
        if len(set(names)) != len(names):
            raise ValueError(f"issuers are named twice: {', '.join(names)}")
        return self


def check_address(address: str) -> None:
    """Let keys come from files, by https, and by http from this machine alone.

    Raises:
        ValueError: the address is anything else.
    """
    if "://" not in address:
        return
    parts = urlsplit(address)
    if parts.username or parts.password:
        raise ValueError(f"keys of {parts.hostname}: no password belongs into a URL")
    if parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        return
    raise ValueError(f"keys {address}: expected a file, https, or http on the loopback device")


def check_exposure(config: SecurityConfig, host: str) -> None:
    """Keep a server that would let in anybody, or speak in clear, on the loopback device.

    Raises:
        ConfigurationError: `host` can be reached from outside and the server is not closed.
    """
    if is_loopback(host):
        return
    if config.anonymous:
        raise ConfigurationError(
            f"the server is to listen on {host} and security.anonymous lets in everybody; listen "
            "on 127.0.0.1, or remove anonymous and give clients keys or tokens"
        )
    if config.tls is None:
        raise ConfigurationError(
            f"the server is to listen on {host} without TLS; name security.tls (make a "
            "certificate with `falaj certificates`) or listen on 127.0.0.1"
        )


def read_security(file: Path) -> SecurityConfig:
    """The configuration in a YAML file; paths in it are seen from its folder.

    Raises:
        ConfigurationError: it cannot be read, or says what cannot be.
    """
    content = read_yaml(file, str(file), f"{file} cannot be read: No such file or directory")
    found = checked(SecurityConfig, content, str(file), "Nothing was started")
    return _seen_from(found, file.resolve().parent)


def _seen_from(config: SecurityConfig, folder: Path) -> SecurityConfig:
    """The same with each relative path, at any depth, in this folder."""

    def seen(issuer: IssuerConfig) -> IssuerConfig:
        keys = issuer.keys if issuer.is_remote else str(folder / issuer.keys)
        return seen_from(folder, issuer).model_copy(update={"keys": keys})

    issuers = tuple(map(seen, config.issuers))
    tls = None if config.tls is None else seen_from(folder, config.tls)
    return seen_from(folder, config).model_copy(update={"issuers": issuers, "tls": tls})


def roles_of(grants: tuple[str, ...] | list[str]) -> Roles:
    """Grants as `model -> actions`."""
    found: dict[str, set[str]] = {}
    for grant in grants:
        action, _, model = grant.partition(":")
        found.setdefault(model, set()).add(action)
    return {model: frozenset(actions) for model, actions in found.items()}
