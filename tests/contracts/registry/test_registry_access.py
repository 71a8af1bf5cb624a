"""Who can see and change definitions through Feast's registry server, and whose definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from feast import Entity, ValueType
from feast.permissions.permission import Permission
from feast.permissions.policy import RoleBasedPolicy

from falaj.feature_servers import feature_servers
from tasks.features.access.audit import AuditTrail
from tasks.features.access.store import apply_definitions, open_store
from tasks.kernel.settings import Settings
from tests.support.data.repository import SmallRepository
from tests.support.services.oidc import Issuer, issuer
from tests.support.services.servers import free_port

grpc = pytest.importorskip(
    "grpc", reason="the registry server needs grpcio, which is not installed"
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")


@dataclass(frozen=True)
class Registry:
    """A served registry that two projects share; the server answers for `flights`."""

    home: Path
    issuer: Issuer
    port: int

    def call(self, token: str | None, rpc: str, request: Any) -> Any:
        from feast.protos.feast.registry.RegistryServer_pb2_grpc import RegistryServerStub

        metadata = [("authorization", f"Bearer {token}")] if token else []
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            return getattr(RegistryServerStub(channel), rpc)(request, metadata=metadata, timeout=30)


def project(folder: Path, name: str, registry: Path) -> tuple[Path, Path]:
    """State folder and repository of a project whose registry is at `registry`."""
    repository = SmallRepository(folder, num_days=1)
    file = repository.path / "feature_store.yaml"
    text = file.read_text().replace("project: flights", f"project: {name}")
    file.write_text(text.replace("${FALAJ_HOME}/feast/registry.db", str(registry)))
    home = folder / "home"
    apply_definitions(open_store(home, repository.path), home, repository.path)
    return home, repository.path


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    shared = tmp_path_factory.mktemp("shared") / "registry.db"
    home, repo = project(tmp_path_factory.mktemp("flights"), "flights", shared)
    project(tmp_path_factory.mktemp("trains"), "trains", shared)
    ports = {"registry": free_port()}
    settings = Settings(home=home, feature_repo=repo)
    with issuer() as identity, pytest.MonkeyPatch.context() as patch:
        for name, value in identity.environment.items():
            patch.setenv(name, value)
        with feature_servers(settings, ["registry"], "127.0.0.1", ports):
            yield Registry(home, identity, ports["registry"])


def describe(registry: Registry, token: str | None) -> Any:
    from feast.protos.feast.registry.RegistryServer_pb2 import ListFeatureViewsRequest

    request = ListFeatureViewsRequest(project="flights")
    return registry.call(token, "ListFeatureViews", request).feature_views


def apply_entity(registry: Registry, token: str | None, project_name: str = "flights") -> Any:
    from feast.protos.feast.registry.RegistryServer_pb2 import ApplyEntityRequest

    entity = Entity(name="gate", join_keys=["gate"], value_type=ValueType.STRING)
    request = ApplyEntityRequest(entity=entity.to_proto(), project=project_name, commit=True)
    return registry.call(token, "ApplyEntity", request)


def grant_all(registry: Registry, token: str | None) -> Any:
    from feast.protos.feast.registry.RegistryServer_pb2 import ApplyPermissionRequest

    wide = Permission(name="wide", policy=RoleBasedPolicy(roles=["nobody"])).to_proto()
    request = ApplyPermissionRequest(permission=wide, project="flights", commit=True)
    return registry.call(token, "ApplyPermission", request)


def delete_view(registry: Registry, token: str | None) -> Any:
    from feast.protos.feast.registry.RegistryServer_pb2 import DeleteFeatureViewRequest

    request = DeleteFeatureViewRequest(name="weather", project="flights", commit=True)
    return registry.call(token, "DeleteFeatureView", request)


ACTS: dict[str, Callable[[Registry, str | None], Any]] = {
    "describe": describe,
    "apply": apply_entity,
    "grant": grant_all,
    "delete": delete_view,
}


@pytest.mark.parametrize("act", ["apply", "grant", "delete"])
@pytest.mark.parametrize("role", ["nobody", "reader", "trainer", "operator"])
def test_definitions_and_permissions_are_changed_by_administrators_alone(
    registry: Registry, role: str, act: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        ACTS[act](registry, registry.issuer.token(role))
    assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_an_administrator_applies_and_the_audit_says_so(registry: Registry) -> None:
    apply_entity(registry, registry.issuer.token("admin", sub="eva"))
    acts = [line.content for line in AuditTrail(registry.home / "audit").lines()]
    (told,) = [a for a in acts if a["who"].get("subject") == "eva" and a["action"] == "apply"]
    assert told["subject"] == {"objects": ["Entity:gate"]}
    assert told["actions"] == ["create"]


def test_definitions_are_seen_with_a_role_and_nothing_without(registry: Registry) -> None:
    assert len(describe(registry, registry.issuer.token("reader"))) == 7
    assert not describe(registry, registry.issuer.token("nobody"))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("token", [None, "junk"])
def test_without_a_token_of_the_issuer_nothing_is_answered(
    registry: Registry, token: str | None, act: str
) -> None:
    with pytest.raises(grpc.RpcError):
        ACTS[act](registry, token)


@pytest.mark.parametrize("name", ["trains", "a_project_that_does_not_exist"])
def test_an_administrator_of_one_project_changes_nothing_of_another(
    registry: Registry, name: str
) -> None:
    """Feast lets every token do everything in a project that has no permissions."""
    with pytest.raises(grpc.RpcError) as raised:
        apply_entity(registry, registry.issuer.token("admin"), name)
    assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_nothing_of_another_project_is_shown(registry: Registry) -> None:
    from feast.protos.feast.registry.RegistryServer_pb2 import (
        ListFeatureViewsRequest,
        ListProjectsRequest,
    )
    from google.protobuf.empty_pb2 import Empty

    token = registry.issuer.token("admin")
    whole = registry.call(token, "Proto", Empty())
    assert {p.spec.name for p in whole.projects} == {"flights"}
    assert len(whole.feature_views) == 7
    listed = registry.call(token, "ListProjects", ListProjectsRequest())
    assert {p.spec.name for p in listed.projects} == {"flights"}
    other = ListFeatureViewsRequest(project="trains")
    assert not registry.call(token, "ListFeatureViews", other).feature_views


def test_the_registry_is_served_on_loopback_alone(registry: Registry) -> None:
    """Feast's own start-up listens on every interface, whatever it is told."""
    hexadecimal = f"{registry.port:04X}"
    listening = [
        line.split()[1].split(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{hexadecimal}") and line.split()[3] == "0A"
    ]
    assert [address[-8:] for address in listening] == ["0100007F"]
