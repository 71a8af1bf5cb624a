"""Bearer tokens (JWT): signature, times, audience, and what their claims allow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jwt

from serving.errors import EndedError, UnauthorizedError
from serving.interfaces import Principal
from serving.security.config import LEEWAY_S, IssuerConfig, roles_of
from serving.security.issuers import KeySource

MAX_TOKEN_BYTES = 8 * 2**10
_GRANT = re.compile(r"(infer|read|admin):(\*|[A-Za-z0-9._-]+)")
_REQUIRED = ("exp", "iss", "aud")
RETRY_S = 1.0
LATEST_S = 1e11
"""Times of tokens lie before the year 5138; what is later is no time."""
_UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)
"""What PyJWT raises for tokens; the last four for numbers and depths that nobody signs."""


class TokenReader:
    """Tokens of any of the configured issuers.

    Args:
        grants: what a role stands for that is no grant itself.
        on_change: called when keys have changed.
    """

    def __init__(
        self,
        issuers: Iterable[IssuerConfig],
        grants: Mapping[str, tuple[str, ...]],
        on_change: Callable[[], None],
    ) -> None:
        self._issuers = {c.issuer: (c, KeySource(c, on_change)) for c in issuers}
        self._grants = grants

    def refresh(self) -> None:
        """Read keys again that are old."""
        for _, source in self._issuers.values():
            source.refresh(is_unknown=False)

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
                algorithms=_algorithms(config),
                issuer=config.issuer,
                audience=config.audience,
                leeway=LEEWAY_S,
                options={"require": [*_REQUIRED, config.subject_claim.partition(".")[0]]},
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
            told = jwt.decode_complete(token, options={"verify_signature": False})
        except _UNREADABLE as exc:
            raise UnauthorizedError(f"what was sent is no token: {exc}") from exc
        header, claimed = told["header"], told["payload"].get("iss")
        if not isinstance(claimed, str) or claimed not in self._issuers:
            raise UnauthorizedError("the token's issuer is not known here")
        config, source = self._issuers[claimed]
        if header.get("alg") not in _algorithms(config) or "crit" in header:
            raise UnauthorizedError(
                f"the token is signed with {header.get('alg')}; expected one of "
                + ", ".join(_algorithms(config))
            )
        return config, _key(config, source, header)

    def _principal(self, claims: Mapping[str, Any], config: IssuerConfig) -> Principal:
        subject = _claim(claims, config.subject_claim)
        if not isinstance(subject, str) or not subject:
            raise UnauthorizedError(f"the token's claim {config.subject_claim} names nobody")
        return Principal(
            subject=subject,
            tenant=_tenant(claims, config),
            roles=roles_of(self._granted(_claim(claims, config.roles_claim))),
            expires=_end(claims["exp"]) + LEEWAY_S,
        )

    def _granted(self, roles: object) -> list[str]:
        """Grants among the roles, and those that other roles stand for; the rest means nothing."""
        names = roles.split() if isinstance(roles, str) else roles
        if not isinstance(names, list):
            return []
        found = [name for name in names if isinstance(name, str)]
        direct = [name for name in found if _GRANT.fullmatch(name)]
        return direct + [grant for name in found for grant in self._grants.get(name, ())]


def _algorithms(config: IssuerConfig) -> list[str]:
    return ["HS256"] if config.secret_file is not None else list(config.algorithms)


def _key(config: IssuerConfig, source: KeySource, header: Mapping[str, Any]) -> jwt.PyJWK:
    name = None if config.secret_file is not None else header.get("kid")
    key = source.find(name)
    if key is None:
        source.refresh(is_unknown=True)
        key = source.find(name)
    if key is None:
        raise UnauthorizedError(
            "the token's key is not among its issuer's; they are read again, so once more may help",
            retry_after_s=RETRY_S,
        )
    if key.algorithm_name != header["alg"]:
        raise UnauthorizedError(
            f"the token says {header['alg']}, and its key is for {key.algorithm_name}"
        )
    return key


def _end(claimed: object) -> float:
    if not isinstance(claimed, int | float) or not 0 < claimed < LATEST_S:
        raise UnauthorizedError("the token's claim exp is no time")
    return float(claimed)


def _tenant(claims: Mapping[str, Any], config: IssuerConfig) -> str:
    if config.tenant_claim is None:
        return config.tenant
    tenant = _claim(claims, config.tenant_claim)
    if not isinstance(tenant, str) or not tenant:
        raise UnauthorizedError(f"the token's claim {config.tenant_claim} names no tenant")
    return tenant


def _claim(claims: Mapping[str, Any], path: str) -> object:
    value: object = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
