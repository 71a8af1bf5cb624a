"""Bearer tokens (JWT): keys of their issuers, signature, times, and what their claims allow."""

import http.client
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from serving.errors import EndedError, UnauthorizedError
from serving.interfaces import Principal
from serving.security.config import GRANT, IssuerConfig, roles_of
from tasks.governance.identity import ALGORITHMS, LEEWAY_S, MAX_TOKEN_BYTES, fetch
from tasks.kernel.errors import ConfigurationError

LOGGER = logging.getLogger(__name__)

LATEST_S = 1e11
"""Times of tokens lie before the year 5138; what is later is no time."""
MIN_RSA_BITS = 2048
MIN_REFRESH_S = 10.0
"""Unknown keys make them be read again at most so often."""
_GRANT = re.compile(GRANT)
_UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)
"""What PyJWT raises for tokens; the last four for numbers and depths that nobody signs."""
Keys = Mapping[str, jwt.PyJWK]


class TokenReader:
    """Tokens of any of the configured issuers.

    Args:
        grants: what a role stands for that is no grant itself.
        on_change: called when keys have changed, in whatever thread read them.

    Raises:
        ConfigurationError: a file holds no keys. An issuer that does not answer is tried again.
    """

    def __init__(
        self,
        issuers: Iterable[IssuerConfig],
        grants: Mapping[str, tuple[str, ...]],
        on_change: Callable[[], None],
    ) -> None:
        self._sources = {c.issuer: KeySource(c, on_change) for c in issuers}
        self._grants = grants

    def refresh(self) -> None:
        """Read keys again that are old."""
        for source in self._sources.values():
            source.refresh(source.config.refresh_s)

    def read(self, token: str) -> Principal:
        """Who the token names.

        Raises:
            UnauthorizedError: it is forged, for somebody else, or by nobody known.
            EndedError: it is genuine and its time is over.
        """
        config, key = self._choose(token)
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                issuer=config.issuer,
                audience=config.audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError as exc:  # the signature was found good before
            raise EndedError(f"the token was refused: {exc}") from exc
        except _UNREADABLE as exc:
            raise UnauthorizedError(f"the token was refused: {exc}") from exc
        return self._principal(claims, config)

    def _choose(self, token: str) -> tuple[IssuerConfig, jwt.PyJWK]:
        """Issuer and key, by what the token says before anything of it is believed."""
        if len(token) > MAX_TOKEN_BYTES:
            raise UnauthorizedError(f"the token has more than {MAX_TOKEN_BYTES} characters")
        try:
            claimed = jwt.decode_complete(token, options={"verify_signature": False})
        except _UNREADABLE as exc:
            raise UnauthorizedError(f"what was sent is no token: {exc}") from exc
        header, issuer = claimed["header"], claimed["payload"].get("iss")
        if not isinstance(issuer, str) or issuer not in self._sources:
            raise UnauthorizedError("the token's issuer is not known here")
        source = self._sources[issuer]
        key = source.find(header.get("kid"))
        if key is None:
            raise UnauthorizedError(
                "the token's key is not among its issuer's; they are read again, so once more "
                "may help",
                retry_after_s=1.0,
            )
        if key.algorithm_name != header.get("alg") or "crit" in header:
            raise UnauthorizedError(
                f"the token is signed with {header.get('alg')}; expected {key.algorithm_name}"
            )
        return source.config, key

    def _principal(self, claims: Mapping[str, Any], config: IssuerConfig) -> Principal:
        expires, tenant = claims["exp"], config.tenant
        if not isinstance(expires, int | float) or not 0 < expires < LATEST_S:
            raise UnauthorizedError("the token's claim exp is no time")
        if config.tenant_claim is not None:
            tenant = _name_in(claims, config.tenant_claim)
        subject, roles = _name_in(claims, "sub"), _claim(claims, config.roles_claim)
        return Principal(subject, tenant, roles_of(self._granted(roles)), expires + LEEWAY_S)

    def _granted(self, roles: object) -> list[str]:
        """Grants among the roles, and those that other roles stand for; the rest means nothing."""
        names = roles.split() if isinstance(roles, str) else roles
        if not isinstance(names, list):
            return []
        found = [name for name in names if isinstance(name, str)]
        direct = [name for name in found if _GRANT.fullmatch(name)]
        return direct + [grant for name in found for grant in self._grants.get(name, ())]


def _name_in(claims: Mapping[str, Any], path: str) -> str:
    name = _claim(claims, path)
    if not isinstance(name, str) or not name:
        raise UnauthorizedError(f"the token's claim {path} names nobody")
    return name


def _claim(claims: Mapping[str, Any], path: str) -> object:
    value: object = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


class KeySource:
    """Public keys of one issuer by their id.

    A file is read where it stands; a URL in a thread, so that no caller waits.
    """

    def __init__(self, config: IssuerConfig, on_change: Callable[[], None]) -> None:
        self.config = config
        self._on_change = on_change
        self._reading = threading.Thread(target=self._read)
        self._tried = time.monotonic()
        self._content = b""
        self._keys: Keys = {}
        if config.is_remote:
            self._read()
        else:
            self._take()

    def find(self, name: str | None) -> jwt.PyJWK | None:
        """The key of this id, or the only one where a token names none; None where unknown.

        An unknown one makes all be read again.
        """
        key = self._found(name)
        if key is None:
            self.refresh(MIN_REFRESH_S)
            key = self._found(name)
        return key

    def _found(self, name: str | None) -> jwt.PyJWK | None:
        keys = self._keys
        if name is None:
            return next(iter(keys.values())) if len(keys) == 1 else None
        return keys.get(name)

    def refresh(self, after_s: float) -> None:
        """Read the keys again if that was not tried for so long."""
        now = time.monotonic()
        if now - self._tried < after_s:
            return
        self._tried = now
        if not self.config.is_remote:
            self._read()
        elif not self._reading.is_alive():
            self._reading = threading.Thread(target=self._read, daemon=True, name="issuer-keys")
            self._reading.start()

    def _read(self) -> None:
        """Take the keys as they are now; where they cannot be read, they stay as they were."""
        try:
            self._take()
        except (OSError, http.client.HTTPException, ConfigurationError) as exc:
            LOGGER.warning("keys of %s were not read: %s", self.config.issuer, exc)

    def _take(self) -> None:
        where, ca_file = self.config.keys, self.config.ca_file
        content = fetch(where, ca_file) if self.config.is_remote else _read_file(where)
        if content != self._content:
            self._keys, self._content = _parse(content, where), content
            self._on_change()


def _read_file(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"keys {file} cannot be read: {exc.strerror}") from exc


def _parse(content: bytes, where: str) -> Keys:
    """Keys that sign; what this server cannot use is left out, secrets are refused.

    Raises:
        ConfigurationError: it is no key set, or one with keys that are no public ones.
    """
    try:
        usable = [e for e in json.loads(content)["keys"] if e.get("use", "sig") == "sig"]
        if any(e.get("kty") == "oct" or "d" in e for e in usable):
            raise ConfigurationError(f"{where} holds secret keys; expected public ones only")
        keys = {str(k.key_id or ""): k for k in jwt.PyJWKSet(usable) if _is_strong(k)}
    except jwt.PyJWKSetError as exc:
        raise ConfigurationError(f"{where} holds no key that signs tokens: {exc}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigurationError(f"{where} is no JSON Web Key Set: {exc!r}") from exc
    if not keys:
        raise ConfigurationError(f"{where} holds no key that signs tokens")
    return keys


def _is_strong(key: jwt.PyJWK) -> bool:
    is_weak = isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS
    if is_weak:
        LOGGER.warning("RSA key %s has less than %d bits and is not used", key.key_id, MIN_RSA_BITS)
    return not is_weak
