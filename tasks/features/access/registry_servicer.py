"""Feast's registry server for one project. Imported only where it is served: it needs grpcio."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from feast.grpc_error_interceptor import ErrorInterceptor
from feast.infra.registry.base_registry import BaseRegistry
from feast.permissions.server.grpc import AuthInterceptor
from feast.project import Project
from feast.protos.feast.registry import RegistryServer_pb2_grpc
from feast.registry_server import RegistryServer

from tasks.features.access.guarded_store import GuardedFeatureStore


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
