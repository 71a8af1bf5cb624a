"""Feast's three servers under this project's guards, one a process.

`python -m tasks.features.access.servers online|offline|registry HOST PORT`, started by
`python -m falaj features serve`. `online` is HTTP, `offline` Arrow Flight, `registry` gRPC.

Feast's registry server for one project. Imported only where it is served: it needs grpcio.

Where feature servers listen and whose tokens they take: checked before anything is started.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pandas as pd
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from feast.errors import FeastError, FeastPermissionError
from feast.feature_server import get_app
from feast.grpc_error_interceptor import ErrorInterceptor
from feast.infra.offline_stores.offline_store import RetrievalJob
from feast.infra.registry.base_registry import BaseRegistry
from feast.offline_server import OfflineServer
from feast.permissions.server.grpc import AuthInterceptor
from feast.permissions.server.utils import ServerType
from feast.project import Project
from feast.protos.feast.registry import RegistryServer_pb2_grpc
from feast.registry_server import RegistryServer

from tasks.features.access.addresses import is_loopback
from tasks.features.access.guarded_store import GuardedFeatureStore
from tasks.features.access.permissions import guard_server
from tasks.features.access.provider import AuditedJob, audit_facts, audit_trail, described_frame
from tasks.features.access.store import open_store
from tasks.kernel.errors import ConfigurationError, DataContractError, FalajError, TransientError
from tasks.kernel.settings import Settings


def registry_server(store: GuardedFeatureStore, threads: ThreadPoolExecutor) -> grpc.Server:
    """The server, not listening yet."""
    server = grpc.server(
        threads,
        interceptors=[AuthInterceptor(), ErrorInterceptor()],
        options=[("grpc.so_reuseport", 0)],  # a taken port is an error, not a shared one
    )
    RegistryServer_pb2_grpc.add_RegistryServerServicer_to_server(
        RegistryServer(OwnProject(store.registry, store.project), store=store), server
    )
    return server


class OwnProject:
    """The registry as if it held one project: Feast's server would list those beside it too."""

    def __init__(self, registry: BaseRegistry, project: str) -> None:
        self._registry = registry
        self._project = project

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def list_projects(self, *arguments: Any, **options: Any) -> list[Project]:
        """The one project, where it was applied."""
        known = self._registry.list_projects(*arguments, **options)
        return [project for project in known if project.name == self._project]


REQUIRED = {
    "auth_discovery_url": "FALAJ_OIDC_DISCOVERY_URL",
    "audience": "FALAJ_OIDC_AUDIENCE",
    "issuer": "FALAJ_OIDC_ISSUER",
}


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and its certificate."""

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


SERVED_PATHS = {
    "/health",
    "/get-online-features",
    "/push",
    "/write-to-online-store",
    "/materialize",
}
"""Feast's server has more: a chat without authentication, static files, a guessed window."""

REGISTRY_TTL_S = 10
REGISTRY_THREADS = 10
EXIT_REFUSED = 2


def serve_online(store: GuardedFeatureStore, at: Listening) -> None:
    """Online reads, pushes and materialization over HTTP, until the process is told to end."""
    guard_server(store, ServerType.REST)
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


def online_app(store: GuardedFeatureStore) -> FastAPI:
    """Feast's application without the paths that are not guarded."""
    app: FastAPI = get_app(store, registry_ttl_sec=REGISTRY_TTL_S)
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


def serve_offline(store: GuardedFeatureStore, at: Listening) -> None:
    """Historical reads and offline pushes over Arrow Flight."""
    guard_server(store, ServerType.ARROW)
    scheme = "grpc+tls" if at.certificate else "grpc+tcp"
    pair = [(_read(at.certificate), _read(at.key))] if at.certificate and at.key else []
    location = f"{scheme}://{at.host}:{at.port}"
    GuardedOfflineServer(store, location, at.host, tls_certificates=pair).serve()


def serve_registry(store: GuardedFeatureStore, at: Listening) -> None:
    """Definitions over gRPC. Feast's own start-up would listen on every interface.

    Raises:
        ConfigurationError: grpcio is not installed, or the address is taken.
    """
    try:
        import grpc

    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"the registry server needs the package of module {exc.name}; install grpcio, "
            "grpcio-reflection and grpcio-health-checking. Nothing was started"
        ) from exc
    guard_server(store, ServerType.GRPC)
    server = registry_server(store, futures.ThreadPoolExecutor(max_workers=REGISTRY_THREADS))
    address = f"{at.host}:{at.port}"
    try:
        if at.certificate and at.key:
            pair = ((_read(at.key), _read(at.certificate)),)
            server.add_secure_port(address, grpc.ssl_server_credentials(pair))
        else:
            server.add_insecure_port(address)
    except RuntimeError as exc:
        raise ConfigurationError(f"{address} cannot be listened on: {exc}") from exc
    server.start()
    server.wait_for_termination()


class GuardedOfflineServer(OfflineServer):
    """Feast's offline server for one project: no SQL from clients, no future, all audited."""

    def __init__(
        self, store: GuardedFeatureStore, location: str, host: str, **options: Any
    ) -> None:
        super().__init__(store, location, host, **options)
        self._trail = audit_trail(store.config)
        # The protocol does not carry the created-time cut-off, so it is always on.
        self.offline_store.get_historical_features = functools.partial(
            self.offline_store.get_historical_features, filter_by_created_timestamp=True
        )

    def get_historical_features(self, command: dict[str, Any], key: Any = None) -> RetrievalJob:
        """Point-in-time read, as first sent and then fetched."""
        self._check(command)
        frame = self.flights[key].to_pandas() if key else None
        return self._audited(super().get_historical_features(command, key), command, frame)

    def _get_historical_features_direct(
        self, command: dict[str, Any], entity_df: pd.DataFrame | str | None
    ) -> RetrievalJob:
        """Point-in-time read in one exchange."""
        self._check(command)
        job = super()._get_historical_features_direct(command, entity_df)
        return self._audited(job, command, entity_df)

    def pull_all_from_table_or_query(self, command: dict[str, Any]) -> RetrievalJob:
        """Rows of a source as they are."""
        return self._audited(super().pull_all_from_table_or_query(command), command, None)

    def pull_latest_from_table_or_query(self, command: dict[str, Any]) -> RetrievalJob:
        """Newest row of each key of a source."""
        return self._audited(super().pull_latest_from_table_or_query(command), command, None)

    def offline_write_batch(self, command: dict[str, Any], key: Any) -> None:
        """Push rows offline."""
        subject = {"views": sorted(command.get("feature_view_names", []))}
        with self._recorded("push", subject, to="offline", rows=self.flights[key].num_rows):
            super().offline_write_batch(command, key)

    def _check(self, command: dict[str, Any]) -> None:
        """Refuse what the permissions do not cover.

        Raises:
            FeastPermissionError: SQL, which reads any file that the server can read, or a view of
                another project, whose permissions this server does not know.
        """
        if command.get("entity_df_sql"):
            self._deny("entity rows as SQL are not served; send them as a table")
        if command.get("project") != self.store.project:
            self._deny(f"this server answers for project {self.store.project} alone")

    def _deny(self, why: str) -> None:
        facts = audit_facts(self.store.config, {"request": "historical-read"})
        self._trail.append("denied", outcome=why, **facts)
        raise FeastPermissionError(why)

    def _audited(
        self, job: RetrievalJob, command: dict[str, Any], frame: pd.DataFrame | str | None
    ) -> RetrievalJob:
        names = command.get("feature_view_names") or [command.get("data_source_name")]
        subject = {"views": sorted(set(names))}
        facts = audit_facts(self.store.config, subject, **described_frame(frame))
        return AuditedJob(job, self._trail, facts)

    def _recorded(
        self, action: str, subject: dict[str, Any], **facts: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        return self._trail.recorded(action, **audit_facts(self.store.config, subject, **facts))


SERVERS: dict[str, Callable[[GuardedFeatureStore, Listening], None]] = {
    "online": serve_online,
    "offline": serve_offline,
    "registry": serve_registry,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to end; 2 when it was refused."""
    parser = argparse.ArgumentParser(prog="python -m tasks.features.access.servers")
    parser.add_argument("kind", choices=SERVERS)
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
        store = open_store(settings.features_home, settings.feature_repo, auth=auth)
        SERVERS[options.kind](store, at)
    except FalajError as exc:
        sys.stderr.write(f"refused: {exc}\n")
        return EXIT_REFUSED
    return 0


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise ConfigurationError(
            f"{file} cannot be read ({exc.strerror}). Nothing was started"
        ) from exc


if __name__ == "__main__":
    sys.exit(main())
