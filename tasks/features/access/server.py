"""Feast's feature server under this project's guards: `python -m tasks.features.access.server`.

Started by `falaj features serve`. Callers send OIDC tokens over HTTP; what no permission
of the repository names is denied, denials and refused tokens are audited. Feast's own checks let
every authenticated caller do everything in a project that has no permissions.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from feast import FeatureStore
from feast.errors import FeastError, FeastPermissionError
from feast.feature_server import get_app
from feast.permissions.action import AuthzedAction
from feast.permissions.auth.auth_manager import get_auth_manager
from feast.permissions.auth.token_parser import TokenParser
from feast.permissions.permission import Permission
from feast.permissions.policy import RoleBasedPolicy
from feast.permissions.security_manager import SecurityManager, set_security_manager
from feast.permissions.server.utils import AuthManagerType, ServerType, init_auth_manager
from feast.permissions.user import User
from starlette.authentication import AuthenticationError

from tasks.features.access.provider import audit_facts, audit_trail
from tasks.features.access.store import GuardedFeatureStore, open_store
from tasks.governance.identity import read_sign_in
from tasks.governance.journal import Journal
from tasks.kernel.errors import ConfigurationError, DataContractError, FalajError, TransientError
from tasks.kernel.settings import Settings
from tasks.kernel.tenants import tenant_of
from tasks.kernel.values import is_loopback

SERVED_PATHS = {
    "/health",
    "/get-online-features",
    "/push",
    "/write-to-online-store",
    "/materialize",
}
"""Feast's server has more: a chat without authentication, static files, a guessed window."""

REQUIRED = {
    "auth_discovery_url": "FALAJ_OIDC_DISCOVERY_URL",
    "audience": "FALAJ_OIDC_AUDIENCE",
    "issuer": "FALAJ_OIDC_ISSUER",
}
EXIT_REFUSED = 2
REFUSED_TOKENS_PAUSE_S = 1.0
NOBODY = Permission(name="nobody", policy=RoleBasedPolicy(roles=[]))
"""Used where a project has no permissions: it covers everything and lets nobody in."""


@dataclass(frozen=True)
class Listening:
    """Where the server listens, and its certificate."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Refuse to take tokens unencrypted from other machines.

        Raises:
            ConfigurationError: the address is not loopback and there is no certificate and key.
        """
        if bool(self.certificate) != bool(self.key):
            raise ConfigurationError(
                "a certificate needs its key and a key its certificate (--tls-cert, --tls-key). "
                "Nothing was started"
            )
        if not self.certificate and not is_loopback(self.host):
            raise ConfigurationError(
                f"listening on {self.host} would take tokens and give features unencrypted; "
                "expected a loopback address, or --tls-cert and --tls-key. Nothing was started"
            )


def oidc_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Feast's section `auth`, from the environment.

    Audience and issuer are asked for because Feast checks neither unless told to: a token that the
    same issuer made for any other service would open this one.

    Raises:
        ConfigurationError: a variable is not set, or the issuer's keys would come unencrypted.
    """
    missing = [name for name in REQUIRED.values() if not environment.get(name)]
    if missing:
        raise ConfigurationError(
            f"serving features needs {', '.join(missing)}, which name the OIDC issuer whose tokens "
            "are accepted; there is no serving without. Nothing was started"
        )
    settings = {"type": "oidc"} | {key: environment[name] for key, name in REQUIRED.items()}
    url = urlsplit(settings["auth_discovery_url"])
    if url.scheme != "https" and not is_loopback(url.hostname or ""):
        raise ConfigurationError(
            f"FALAJ_OIDC_DISCOVERY_URL reads the issuer's keys from {url.hostname} unencrypted; "
            "expected https. Nothing was started"
        )
    if client := environment.get("FALAJ_OIDC_CLIENT_ID"):
        settings["client_id"] = client  # where Keycloak puts roles: resource_access.<client>.roles
    return settings


def serve(store: GuardedFeatureStore, at: Listening) -> None:
    """Serve online reads, pushes and materialization until the process is told to end."""
    guard_server(store)
    uvicorn.run(
        online_app(store),
        host=at.host,
        port=at.port,
        ssl_certfile=at.certificate,
        ssl_keyfile=at.key,
        http="h11",  # httptools takes a body behind `Upgrade` for the next request
        access_log=False,
        log_level="warning",
    )


def guard_server(store: FeatureStore) -> None:
    """Let Feast's server of this process ask for tokens, and deny what is not permitted.

    Raises:
        ConfigurationError: the registry holds no permissions, so everything would be denied.
    """
    if not store.list_permissions():
        raise ConfigurationError(
            f"project {store.project} has no permissions in its registry, so every request would "
            "be denied; define them in the feature repository (permissions.py) and run "
            "feature_refresh. Nothing was started"
        )
    trail = audit_trail(store.config)
    set_security_manager(DenyingSecurityManager(store, trail))
    init_auth_manager(ServerType.REST, AuthManagerType.OIDC, store.config.auth_config)
    manager = get_auth_manager()
    manager._token_parser = AuditedTokenParser(manager.token_parser, trail, store)


def online_app(store: GuardedFeatureStore) -> FastAPI:
    """Feast's application without the paths that are not guarded."""
    app: FastAPI = get_app(store, registry_ttl_sec=10)
    app.router.routes = [r for r in app.router.routes if getattr(r, "path", "") in SERVED_PATHS]
    app.add_exception_handler(FeastError, _answer_feast_error)
    app.add_exception_handler(FalajError, _answer_our_error)
    return app


def _answer_feast_error(request: Request, error: Exception) -> JSONResponse:
    """As Feast answers, which its clients read; without its stack trace in the log."""
    assert isinstance(error, FeastError)
    return JSONResponse(status_code=error.http_status_code(), content=error.to_error_detail())


def _answer_our_error(request: Request, error: Exception) -> JSONResponse:
    """A refusal is the caller's to mend, a failure may pass."""
    refused = isinstance(error, DataContractError | ConfigurationError)
    status = 422 if refused else 503 if isinstance(error, TransientError) else 500
    return JSONResponse(status_code=status, content=str(error))


class DenyingSecurityManager(SecurityManager):
    """Permissions of one project; what none of them names is denied, and denials are audited."""

    def __init__(self, store: FeatureStore, trail: Journal) -> None:
        super().__init__(project=store.project, registry=store.registry)
        self._store = store
        self._trail = trail

    @property
    def permissions(self) -> list[Permission]:
        """Those of the served project; where there are none, and for any other, nobody's."""
        if (self._current_project.get() or self._project) != self._project:
            return [NOBODY]
        return list(super().permissions) or [NOBODY]

    def assert_permissions(
        self,
        resources: list[Any],
        actions: AuthzedAction | list[AuthzedAction],
        filter_only: bool = False,
    ) -> list[Any]:
        """Return the permitted resources; with `filter_only` the others are left out.

        Raises:
            FeastPermissionError: the caller may not do this to one of them.
        """
        asked = actions if isinstance(actions, list) else [actions]
        if filter_only:
            return [resource for resource in resources if self._permits(resource, asked)]
        try:
            return list(super().assert_permissions(resources, asked))
        except FeastPermissionError:
            subject = {"objects": sorted(f"{type(r).__name__}:{r.name}" for r in resources)}
            facts = audit_facts(self._store.config, subject, actions=[a.value for a in asked])
            self._trail.append("denied", outcome="denied", **facts)
            raise

    def _permits(self, resource: Any, actions: list[AuthzedAction]) -> bool:
        try:
            return bool(super().assert_permissions([resource], actions))
        except FeastPermissionError:
            return False


class AuditedTokenParser(TokenParser):
    """Reads tokens as Feast does; refused ones leave a line, at most one a second.

    A tenant's server takes tokens of its own tenant alone: the issuer is the others' too.
    """

    def __init__(self, parser: TokenParser, trail: Journal, store: FeatureStore) -> None:
        self._parser = parser
        self._trail = trail
        self._project = store.project
        self._tenant = tenant_of(home := trail.folder.parent)
        config = read_sign_in(home) if self._tenant else None
        self._claim = config.tenant_claim if config else "tenant"
        self._lock = threading.Lock()
        self._refused = 0
        self._noted_s = -REFUSED_TOKENS_PAUSE_S

    async def user_details_from_access_token(self, access_token: str) -> User:
        """The caller that a token names.

        Raises:
            AuthenticationError: it is no token of this issuer for this service, has expired, or
                is another tenant's.
        """
        try:
            user = await self._parser.user_details_from_access_token(access_token)
            if self._tenant:
                claims = jwt.decode(access_token, options={"verify_signature": False})  # it is
                if claims.get(self._claim) != self._tenant:
                    raise AuthenticationError(f"this server is for tokens of {self._tenant}")
            return user
        except AuthenticationError:
            self._note()
            raise

    def _note(self) -> None:
        with self._lock:
            self._refused += 1
            if time.monotonic() - self._noted_s < REFUSED_TOKENS_PAUSE_S:
                return
            self._noted_s = time.monotonic()
            count, self._refused = self._refused, 0
        who = {"subject": None}
        self._trail.append(
            "denied", outcome="token refused", project=self._project, who=who, tokens=count
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to end; 2 when it was refused."""
    parser = argparse.ArgumentParser(prog="python -m tasks.features.access.server")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    options = parser.parse_args(arguments)
    at = Listening(options.host, options.port, options.tls_cert, options.tls_key)
    settings = Settings.from_environment()
    try:
        at.check()
        auth = oidc_settings(os.environ)
        serve(open_store(settings.features_home, settings.feature_repo, auth=auth), at)
    except FalajError as exc:
        sys.stderr.write(f"refused: {exc}\n")
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
