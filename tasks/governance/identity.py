"""Who acts: the subject of a token that an OpenID Connect issuer signed, or the machine's user.

One file in the state folder, `sign-in.yaml`, names the issuer (OpenID Connect Core 1.0, Discovery
1.0; any issuer will do). Without it the user of the operating system is the one owner and may do
everything. With it a name counts that a verified token says, and nothing that was typed. A person
who may write the state folder can change that file: it is closed to others, see the threat model.
"""

import base64
import json
import os
import ssl
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, PositiveInt, field_validator

from tasks.governance.journal import process_identity
from tasks.kernel.errors import AccessError, ConfigurationError, TransientError
from tasks.kernel.files import locked, make_folder, read_yaml, write_atomically
from tasks.kernel.tenants import installation_of, read_tenants, tenant_of
from tasks.kernel.values import Contract, checked, is_loopback, seen_from

ROLES = ("viewer", "operator", "approver", "auditor", "admin")
EVERY = "*"
"""Stands for all use cases of the tenant."""
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")
"""Of signatures; which of them, an issuer's key says."""
LEEWAY_S = 10
"""Clocks of issuers and servers may differ by this."""
ISSUER_TIMEOUT_S = 5
"""For one answer of an issuer."""
MAX_TOKEN_BYTES, MAX_ANSWER_BYTES = 8 * 2**10, 2**20
Tenant = Annotated[str, Field(min_length=1)]
CONTROLLER = "service:controller"
"""Trains where no person did: on a schedule, or because the controller decided so."""
CREATORS = uuid.UUID("6f1f1f39-3c0c-5a0e-9a2b-0d5f0e9a7c11")
TOKEN_FILE = "FALAJ_TOKEN_FILE"


class Program(Contract):
    """What a program is that shows a certificate (mutual TLS)."""

    tenant: Tenant
    roles: tuple[str, ...]
    use_cases: tuple[str, ...] = (EVERY,)


class SignIn(Contract):
    """How people and programs sign in.

    Attributes:
        discovery: None: the issuer's own, `/.well-known/openid-configuration`.
        audience: of programs' tokens; None: the client's id, as people's tokens have it.
        ca_file: authority that vouches for the issuer; None for the system's.
        owners: tenant of a use case that is not the installation's own.
        programs: by the subject of a certificate (RFC 2253), as `CN=batch,O=acme`.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    issuer: str = Field(min_length=1, description="Exact value of the claim `iss`.")
    client_id: str = Field(min_length=1, description="Of this installation, at the issuer.")
    client_secret: Path = Field(description="File with its secret; read by the gateway alone.")
    discovery: str | None = None
    audience: str | None = None
    ca_file: Path | None = None
    scopes: tuple[str, ...] = ("openid",)
    """What browsers ask the issuer for; those that bring the claims below."""
    name_claim: str = Field(default="sub", description="Who acts; unique at the issuer.")
    roles_claim: str = "roles"
    tenant_claim: str = "tenant"
    use_cases_claim: str = "use_cases"
    tenant: Tenant = "falaj"
    """Tenant that runs the installation: what is of no single use case is its people's alone."""
    owners: dict[str, Tenant] = Field(default_factory=dict)
    programs: dict[str, Program] = Field(default_factory=dict)
    keys_kept_s: PositiveInt = 60
    """Seconds after which the issuer's keys are read again: those taken back count no more."""
    max_age_s: PositiveInt = 8 * 3600
    """Seconds after which a sign-in ends, however long its token would last."""
    two_approvers: tuple[Literal["release", "waiver"], ...] = ("release", "waiver")
    """What two people have to agree to."""

    @field_validator("issuer", "discovery")
    @classmethod
    def _is_private(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "https:")
        if parts.scheme == "https" or is_loopback(parts.hostname or ""):
            return url
        raise ValueError(f"{url}: expected https, or http on the loopback device")

    @property
    def discovery_url(self) -> str:
        """Where the issuer describes itself."""
        return self.discovery or f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"

    @property
    def audiences(self) -> tuple[str, ...]:
        """Values of which a token's `aud` has to hold one."""
        return tuple(dict.fromkeys([self.client_id, self.audience or self.client_id]))

    def owner(self, use_case: str | None) -> str:
        """Tenant of a use case; of the installation, where none is named."""
        return self.owners.get(use_case or "", self.tenant)


@dataclass(frozen=True)
class Subject:
    """Who acts.

    Attributes:
        is_bound: False for the machine's user where nobody signs in, and for who broke the glass:
            no duty binds them.
    """

    name: str
    tenant: str
    roles: tuple[str, ...]
    use_cases: tuple[str, ...]
    is_bound: bool = True


def sign_in_file(home: Path) -> Path:
    """Names the issuer, for all tenants; where it is absent, nobody signs in."""
    return installation_of(home) / "sign-in.yaml"


def read_sign_in(home: Path) -> SignIn | None:
    """How people sign in; None where the machine's user is the owner.

    Raises:
        ConfigurationError: the file says what cannot be.
    """
    file = sign_in_file(home)
    try:
        content = read_yaml(file, str(file))
    except FileNotFoundError:
        return None
    found = checked(SignIn, content, str(file), "Nothing was done")
    if found.tenant in read_tenants(file.parent):
        raise ConfigurationError(
            f"{file} has the tenant {found.tenant} run the installation, and it has a state of its "
            "own: its admins would be those of all. Give one another name. Nothing was done"
        )
    own = {"tenant": name, "owners": {}} if (name := tenant_of(home)) else {}
    return seen_from(file.parent, found).model_copy(update=own)


def owner() -> Subject:
    """The machine's user, who owns the installation where nobody signs in."""
    return Subject(process_identity()["user"], "", ROLES, (EVERY,), is_bound=False)


def current_subject(home: Path) -> Subject:
    """Who gives the command that this process carries out.

    Raises:
        AccessError: people sign in here and nobody has, or the token is not good.
        TransientError: the issuer does not answer.
    """
    config = read_sign_in(home)
    if config is None:
        return owner()
    file = token_file(config, os.environ)
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise AccessError(
            f"{file} holds no token ({type(exc).__name__}), and this installation wants to know "
            f"who acts; run `falaj login`, or name a file in {TOKEN_FILE}. Nothing was done"
        ) from exc
    subject = verified(token, config)
    if subject.name in switched_off(home):
        raise AccessError(f"the account {subject.name} is switched off. Nothing was done")
    return subject


def token_file(config: SignIn, environment: Mapping[str, str]) -> Path:
    """Where a person's token is: as the environment says, else where `falaj login` keeps it."""
    if named := environment.get(TOKEN_FILE):
        return Path(named)
    folder = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    name = sha256(f"{config.issuer} {config.client_id}".encode()).hexdigest()[:16]
    return folder / "falaj" / f"{name}.token"


def keep_token(token: str, config: SignIn, environment: Mapping[str, str]) -> Subject:
    """Keep a verified token for later commands, mode 600; returns whose it is.

    Raises:
        AccessError: the token is not good.
        TransientError: the issuer does not answer.
    """
    subject, file = verified(token, config), token_file(config, environment)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(file, token + "\n", private=True)
    return subject


def verified(token: str, config: SignIn) -> Subject:
    """The subject of a token: signature, issuer, audience and times are checked (RFC 8725).

    Raises:
        AccessError: the token is not good.
        TransientError: the issuer does not answer.
    """
    import jwt

    refused = "the token was refused: {}. Run `falaj login` for a new one. Nothing was done"
    if len(token) > MAX_TOKEN_BYTES:
        raise AccessError(refused.format("it is too long"))
    try:
        header = jwt.get_unverified_header(token)
        if header.get("alg") not in ALGORITHMS:
            raise AccessError(refused.format(f"its algorithm is {header.get('alg')!r}"))
        keys = fetch_json(str(discovered(config)["jwks_uri"]), config)
        key = jwt.PyJWKSet.from_dict(keys)[str(header.get("kid"))]
        claims = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            issuer=config.issuer,
            audience=config.audiences,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iat", "iss", "aud"]},
        )
    except (jwt.PyJWTError, KeyError, ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise AccessError(refused.format(exc)) from exc
    if problem := session_over(claims, config):
        raise AccessError(refused.format(problem))
    return subject_of(claims, config)


def session_over(claims: Mapping[str, Any], config: SignIn) -> str:
    """Why a genuine token does not count any more; empty where it does."""
    since = claims.get("auth_time", claims.get("iat"))
    if not isinstance(since, int | float):
        return "it does not say when it was issued"
    return "the sign-in is too old" if time.time() > since + config.max_age_s + LEEWAY_S else ""


def subject_of(claims: Mapping[str, Any], config: SignIn) -> Subject:
    """Who the claims of a verified token name.

    Raises:
        AccessError: they name nobody, or no tenant.
    """
    name, tenant = claims.get(config.name_claim), claims.get(config.tenant_claim)
    for claim, value in ((config.name_claim, name), (config.tenant_claim, tenant)):
        if not isinstance(value, str) or not value or value.startswith("service:"):
            raise AccessError(f"the token's claim {claim} names nobody. Nothing was done")
    roles, use_cases = (_words(claims.get(c)) for c in (config.roles_claim, config.use_cases_claim))
    if claims.get(config.use_cases_claim) == "":  # said, and narrowed to none
        use_cases = (EVERY,)
    return Subject(str(name), str(tenant), roles, use_cases)


def _words(claim: object) -> tuple[str, ...]:
    """Names in a list, or between blanks or commas in a text."""
    found = claim.replace(",", " ").split() if isinstance(claim, str) else claim
    return tuple(one for one in found if isinstance(one, str)) if isinstance(found, list) else ()


def discovered(config: SignIn) -> dict[str, Any]:
    """What the issuer says of itself.

    Raises:
        ConfigurationError: it is another issuer, or names no addresses.
        TransientError: it does not answer.
    """
    found = fetch_json(config.discovery_url, config)
    wanted = ("authorization_endpoint", "token_endpoint", "jwks_uri")
    if found.get("issuer") != config.issuer or not all(found.get(name) for name in wanted):
        raise ConfigurationError(
            f"{config.discovery_url} describes the issuer {found.get('issuer')!r}; expected "
            f"{config.issuer!r} with {', '.join(wanted)}. Nothing was done"
        )
    return found


def fetch_json(url: str, config: SignIn) -> dict[str, Any]:
    """A document of the issuer of sign-ins.

    Raises:
        TransientError: it does not answer.
    """
    try:
        return dict(json.loads(fetch(url, config.ca_file)))
    except (OSError, HTTPException, ValueError, TypeError) as exc:
        raise TransientError(f"the issuer at {url} does not answer as one: {exc}") from exc


def fetch(url: str, ca_file: Path | None) -> bytes:
    """What an issuer publishes; a proxy of the environment is not asked: loopback needs none.

    Raises:
        OSError: it is not to be had, is too long, or the issuer sends elsewhere for it.
    """
    tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect(), tls)
    with opener.open(url, timeout=ISSUER_TIMEOUT_S) as answer:
        content: bytes = answer.read(MAX_ANSWER_BYTES + 1)
    if len(content) > MAX_ANSWER_BYTES:
        raise OSError(f"{url} answered with more than {MAX_ANSWER_BYTES} bytes")
    return content


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Documents come from the address that was configured, and from no other."""

    def redirect_request(self, *arguments: Any, **_: Any) -> None:
        raise urllib.error.URLError("the issuer sends elsewhere; name that address")


def creator_headers(name: str) -> dict[str, str]:
    """What Prefect keeps as the creator of a run; the authorizer lets nobody else send it."""
    told = base64.b64encode(name.encode()).decode()
    return {"prefect-automation-id": creator_id(name), "prefect-automation-name": told}


def creator_id(name: str) -> str:
    """What is kept beside a creator's name, so that no automation is taken for a person."""
    return str(uuid.uuid5(CREATORS, name))


def denied_file(home: Path) -> Path:
    """Accounts that are switched off in a state; the installation's are in all tenants too."""
    return home / "access" / "denied.json"


def switched_off(home: Path) -> Mapping[str, Mapping[str, str]]:
    """Accounts that are refused whatever they show, with who said so and when.

    Raises:
        ConfigurationError: a file was changed and says nothing any more; nobody is let in.
    """
    return {**_denied(denied_file(home)), **_denied(denied_file(installation_of(home)))}


def _denied(file: Path) -> dict[str, dict[str, str]]:
    try:
        found = json.loads(file.read_bytes())
        return {str(name): dict(facts) for name, facts in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise ConfigurationError(f"{file} cannot be read, so nobody is let in: {exc}") from exc


def switch(home: Path, names: Collection[str], by: str, *, off: bool) -> None:
    """Switch accounts off, from the next request on; or on again."""
    file = denied_file(home)
    make_folder(file.parent)  # tenants that are users of their own read it: names, no secrets
    facts = {"by": by, "since": datetime.now(UTC).isoformat()}
    with locked(file.with_suffix(".lock")):
        denied = {name: f for name, f in _denied(file).items() if name not in names}
        denied |= dict.fromkeys(names if off else (), facts)
        write_atomically(file, json.dumps(denied, indent=1) + "\n")
