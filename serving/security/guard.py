"""The guard of a serving process: who asks, what that one may do, and how often."""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from serving.config import ServingConfig
from serving.errors import EndedError, ForbiddenError, TooManyRequestsError, UnauthorizedError
from serving.interfaces import Action, Guard, Headers, Principal
from serving.security.config import (
    FAILURES,
    KEYS_FILE,
    MOST_KNOWN,
    SECURITY_FILE,
    Rate,
    SecurityConfig,
    SecuritySection,
    check_exposure,
    read_security,
    roles_of,
)
from serving.security.keys import KeyRing
from serving.security.tls import RenewingTls, grpc_credentials
from serving.security.tokens import TokenReader
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.tenants import tenant_of
from tasks.kernel.values import is_loopback

if TYPE_CHECKING:
    import grpc


@dataclass(slots=True)
class _Bucket:
    tokens: float
    counted: float
    per_s: float
    burst: float


@dataclass
class Buckets:
    """One token bucket a name; the name that was longest not seen makes room for a new one.

    Args:
        rate: of all that `special` does not name.
        capacity: names that are remembered. Who is forgotten begins with a full bucket, so a
            bound far below the number of clients weakens the limit; it never strengthens it.
        clock: seconds that only grow.
    """

    rate: Rate
    capacity: int
    special: dict[str, Rate] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _buckets: OrderedDict[str, _Bucket] = field(default_factory=OrderedDict)

    def take(self, name: str) -> float:
        """Take one request; 0.0 where it was there, else the seconds until there is one."""
        now = self.clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._remember(name, now)
        self._buckets.move_to_end(name)
        tokens = bucket.tokens + (now - bucket.counted) * bucket.per_s
        bucket.counted = now
        if tokens < 1.0:
            bucket.tokens = tokens
            return (1.0 - tokens) / bucket.per_s
        bucket.tokens = (tokens if tokens < bucket.burst else bucket.burst) - 1.0
        return 0.0

    def _remember(self, name: str, now: float) -> _Bucket:
        if len(self._buckets) >= self.capacity:
            self._buckets.popitem(last=False)
        rate = self.special.get(name, self.rate)
        bucket = self._buckets[name] = _Bucket(rate.burst, now, rate.per_s, rate.burst)
        return bucket


_SUBJECT = re.compile(r'(?:^|;)Subject="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def subject_of(value: str) -> str:
    r"""Subject of the certificate, as RFC 2253 writes it.

    The edge replaces the header (`SANITIZE_SET`), so it has one element and one subject. Its
    backslashes are those of RFC 2253 and stay: without them a common name with a comma in it,
    `CN=batch\,O=acme`, would be taken for the two names `CN=batch,O=acme`.

    Raises:
        UnauthorizedError: it names none or several.
    """
    found = _SUBJECT.findall(value)
    if len(found) != 1 or not found[0]:
        raise UnauthorizedError("the edge named no subject of a certificate, or several")
    return str(found[0])


ADDRESS_HEADER = b"x-falaj-address"
"""Set by the edge, which removes what clients say of it."""
COPY = (b"x-falaj-slot", b"shadow")
"""Set by the edge on the copy of a request; its client asked once."""
REFRESH_LOOK_S = 1.0
"""A revoked key is refused after this at the latest."""
KNOWN_S = 60.0
"""A principal that was verified is believed for so long."""


class SecurityGuard:
    """Bearer tokens, API keys and certificates, checked once and remembered for a while.

    What is remembered is named by the SHA-256 of what was presented. It is forgotten when keys
    of issuers or API keys change, when the credential ends, and after `KNOWN_S`.

    Every credential is checked, whatever came from its address before, so that nobody is kept out
    by what strangers present there. That costs a bounded time: a token has at most
    `tokens.MAX_TOKEN_BYTES` and one signature. The limit of refused credentials is spent by what
    nobody here has issued, and only that is answered 429.

    Args:
        tenant: whose server it is; tokens of others let nobody in. Empty: an installation's own.

    Raises:
        ConfigurationError: files that the configuration names are not as they must be.
    """

    def __init__(
        self, config: SecurityConfig, clock: Callable[[], float] = time.monotonic, tenant: str = ""
    ) -> None:
        if config.certificates and not config.behind_edge:
            raise ConfigurationError(
                "security.certificates come from the edge, and this server has none before it; "
                "start it with the file that `falaj gateway prepare` wrote, "
                "or remove them"
            )
        self._config, self._clock, self._tenant = config, clock, tenant
        limits = config.limits
        special = {n if "/" in n else f"/{n}": rate for n, rate in limits.by_subject.items()}
        self._requests = Buckets(limits.client, MOST_KNOWN, special, clock)
        self._failures = Buckets(FAILURES, MOST_KNOWN, clock=clock)
        self._known: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()
        """Who was verified, by digest, and until when on the clock that counts."""
        self._tokens = TokenReader(config.issuers, config.grants, self.forget)
        self._keys = KeyRing(config.api_keys, self.forget) if config.api_keys else None
        self._looked = clock()
        roles = roles_of(config.anonymous)
        self._anonymous = Principal("anonymous", "", roles, math.inf) if roles else None

    def forget(self) -> None:
        """Ask everybody again."""
        self._known = OrderedDict()

    def admit(self, headers: Headers, address: str, action: Action, model: str | None) -> Principal:
        """Who asks, if that is allowed now.

        Raises:
            UnauthorizedError: nothing, or nothing valid, was presented.
            ForbiddenError: role or tenant do not allow it.
            TooManyRequestsError: more often than allowed; says when to come again.
        """
        found = self.recognise(headers, address)
        is_copy = self._config.behind_edge and COPY in headers
        # Tenants may have subjects of the same name.
        wait_s = 0.0 if is_copy else self._requests.take(f"{found.tenant}/{found.subject}")
        if wait_s:
            raise TooManyRequestsError(
                f"{found.subject} asks more often than it may; come again in {wait_s:.2f} s",
                retry_after_s=wait_s,
            )
        self._check(found, action, model)
        return found

    def recognise(self, headers: Headers, address: str) -> Principal:
        """Who asks, whom this server knows.

        Raises:
            UnauthorizedError: nothing, or nothing valid, was presented.
            TooManyRequestsError: too much that is not valid came from this address.
        """
        now = self._clock()
        if now - self._looked >= REFRESH_LOOK_S:
            self._looked = now
            self._tokens.refresh()
            if self._keys is not None:
                self._keys.look()
        presented = self._presented(headers)
        if presented is None:
            if self._anonymous is not None:
                return self._anonymous
            raise UnauthorizedError("nothing was presented; send a bearer token or an API key")
        kind, value = presented
        digest = sha256(kind + value).digest()
        known, until = self._known.get(digest, (None, 0.0))
        if known is not None and now < until:
            return known
        return self._verified(kind, value, digest, self._address(headers, address))

    def _presented(self, headers: Headers) -> tuple[bytes, bytes] | None:
        """What stands in the headers: exactly one credential, or a certificate with none."""
        found: list[tuple[bytes, bytes]] = []
        certificate = None
        for name, value in headers:
            if name == b"authorization":
                found.append((b"t", value))
            elif name == b"x-api-key":
                found.append((b"k", value))
            elif name == b"x-forwarded-client-cert" and self._config.behind_edge:
                certificate = (b"c", value)
        if len(found) > 1:
            raise UnauthorizedError("several credentials were presented; send one")
        return found[0] if found else certificate

    def _verified(self, kind: bytes, value: bytes, digest: bytes, address: str) -> Principal:
        # What is forgotten meanwhile, in another thread, stays so.
        known, now = self._known, self._clock()
        try:
            principal = self._verify(kind, value)
        except UnauthorizedError as exc:
            self._refuse(exc, address)
        seconds = min(KNOWN_S, principal.expires - time.time())
        known[digest] = principal, now + seconds
        if len(known) > MOST_KNOWN:
            known.popitem(last=False)
        return principal

    def _refuse(self, error: UnauthorizedError, address: str) -> NoReturn:
        """Say what is wrong with a credential; past the limit only that too many were.

        Who comes with one that has ended learns that in any case: it is no guess.
        """
        wait_s = 0.0 if isinstance(error, EndedError) else self._failures.take(address)
        if wait_s:
            raise TooManyRequestsError(
                "this credential is not valid, and too many such came from this address",
                retry_after_s=wait_s,
            )
        raise type(error)(str(error), error.retry_after_s)

    def _verify(self, kind: bytes, value: bytes) -> Principal:
        if kind == b"t":
            if value[:7].lower() != b"bearer ":
                raise UnauthorizedError("expected `Authorization: Bearer <token>`")
            found = self._tokens.read(value[7:].strip().decode("latin-1"))
            if self._tenant and found.tenant != self._tenant:  # the issuer is the others' too
                raise UnauthorizedError(f"this server is for tokens of the tenant {self._tenant}")
            return found
        return self._by_key(value) if kind == b"k" else self._by_certificate(value)

    def _by_key(self, value: bytes) -> Principal:
        if self._keys is None:
            raise UnauthorizedError("no API keys are known here; send a bearer token")
        key = self._keys.find(value)
        expires = key.expires.timestamp() if key.expires else float("inf")
        return Principal(key.subject, key.tenant, roles_of(key.grants), expires)

    def _by_certificate(self, value: bytes) -> Principal:
        subject = subject_of(value.decode("latin-1"))
        grants = self._config.certificates.get(subject)
        if grants is None:
            raise UnauthorizedError(f"the certificate of {subject} stands for nobody here")
        tenant = self._config.certificate_tenants.get(subject, "")
        return Principal(subject, tenant, roles_of(grants), float("inf"))

    def _address(self, headers: Headers, address: str) -> str:
        """Where the client is: behind the edge, what that says."""
        if self._config.behind_edge:
            for name, value in headers:
                if name == ADDRESS_HEADER:
                    return value.decode("latin-1")
        return address

    def _check(self, principal: Principal, action: Action, model: str | None) -> None:
        if not principal.may(action, model):
            what = f"model {model}" if model else "this server"
            raise ForbiddenError(f"{principal.subject} may not {action} on {what}")
        if not principal.tenant:
            return
        owner = self._config.owners.get(model or "", self._tenant)
        if owner and owner != principal.tenant:
            raise ForbiddenError(f"model {model} does not belong to {principal.tenant}")
        if action == "admin" and not owner:
            raise ForbiddenError("what tenants share is for operators to load and unload")


_EVERYBODY = Principal("", "", roles_of(["infer:*", "read:*", "admin:*"]), math.inf)
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:@\[\]]+))(?::\d*)?")
"""A host, in brackets or not, and perhaps a port; RFC 3986, section 3.2, without a user."""


class OpenGuard:
    """Admits everybody, on loopback alone.

    A browser on this machine is part of it, and the pages that it shows are not. What such a page
    asks names it in `Origin`, or, where the page's own name was pointed at this machine, in `Host`.
    """

    def __init__(self, config: ServingConfig) -> None:
        """Refuse to stand before a listener that others can reach.

        Raises:
            ConfigurationError: it is not on loopback, or is not to be open.
        """
        if not is_loopback(config.host) or not config.open_to_all:
            raise ConfigurationError(
                f"host={config.host} and open_to_all={config.open_to_all} need a guard that knows "
                "clients (section `security`); without one the server listens on 127.0.0.1 with "
                "open_to_all: true only. Nothing was started"
            )

    def recognise(self, headers: Headers, address: str) -> Principal:
        """Everybody, but for pages that a browser on this machine has from elsewhere.

        Raises:
            ForbiddenError: a page of another site asks.
        """
        return self.admit(headers, address, "read", None)

    def admit(self, headers: Headers, address: str, action: Action, model: str | None) -> Principal:
        """Everybody, but for pages that a browser on this machine has from elsewhere.

        Raises:
            ForbiddenError: a page of another site asks.
        """
        for name, value in headers:
            if (name == b"origin" and not _is_local(value.partition(b"://")[2])) or (
                name == b"host" and not _is_local(value)
            ):
                raise ForbiddenError(
                    "a page of another site may not use this server; it is open to this machine's "
                    "own programs"
                )
        return _EVERYBODY


@lru_cache(256)
def _is_local(authority: bytes) -> bool:
    host = _AUTHORITY.fullmatch(authority.decode("latin-1"))
    return host is not None and is_loopback(host[1] or host[2])


BEHIND_EDGE_FILE = Path("edge") / "server-security.yaml"
"""The same with mutual TLS, as `falaj gateway prepare` writes it."""


@dataclass(frozen=True)
class Secured:
    """What closes a serving process.

    Attributes:
        tls: of the HTTP listener.
        grpc: credentials of the gRPC listener; None where it can be on loopback only, in clear.
    """

    guard: Guard
    tls: RenewingTls | None = None
    grpc: grpc.ServerCredentials | None = None


def secured(section: SecuritySection, home: Path, host: str) -> Secured | None:
    """Guard and TLS of a process; None where the state folder says nothing of clients.

    A tenant's server is closed in any case: to all but API keys, where nothing is said.

    Args:
        section: `security` of the configuration.
        home: state folder.
        host: address that the process listens on.

    Raises:
        ConfigurationError: a file is absent, wrong, or would open the server to the outside.
    """
    file = home / (BEHIND_EDGE_FILE if section.edge else SECURITY_FILE)
    if section.edge and not file.exists():
        raise ConfigurationError(f"there is no {file}; run `falaj gateway prepare` first")
    tenant = tenant_of(home)
    if not file.exists() and not tenant:
        return None
    # Other tenants of the machine reach its loopback device too.
    config = read_security(file) if file.exists() else SecurityConfig(api_keys=home / KEYS_FILE)
    check_exposure(config, host)
    tls = RenewingTls(config.tls) if config.tls else None
    credentials = grpc_credentials(config.tls) if config.tls and config.tls.client_ca else None
    return Secured(SecurityGuard(config, tenant=tenant), tls, credentials)
