import json
import os
import shutil
from pathlib import Path
from ssl import TLSVersion
from typing import Any
from unittest.mock import patch

import pytest
import redis
import yaml
from feast.infra.online_stores.redis import RedisOnlineStore

from tasks.features.access.profile import profile_file, read_profile
from tasks.features.access.store import open_store
from tasks.features.config import recorded_config
from tasks.kernel.errors import ConfigurationError, FeatureStoreError
from tests.support.data.profiles import write_profiles
from tests.support.data.repository import SmallRepository

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
REDIS = "127.0.0.1:6379"
REGISTRY = "postgresql+psycopg://feast:secret@127.0.0.1/feast"
ENVIRONMENT = {"FALAJ_REDIS": REDIS, "FALAJ_REGISTRY_URL": REGISTRY}


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The profiles of the project, in a folder to spoil."""
    folder = tmp_path / "feature_repo"
    write_profiles(folder)
    return folder


@pytest.fixture
def server(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, read with the profile that has servers."""
    monkeypatch.setenv("FALAJ_PROFILE", "server")
    return repo


def change(file: Path, path: str, value: Any) -> None:
    """Set `a.b.c` of a YAML file, or remove it where the value is None."""
    described = yaml.safe_load(file.read_text())
    *sections, last = path.split(".")
    part = described
    for section in sections:
        part = part[section]
    if value is None:
        part.pop(last, None)
    else:
        part[last] = value
    file.write_text(yaml.safe_dump(described))


def read(repo: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    with patch.dict(os.environ, environment or ENVIRONMENT):
        return read_profile(repo.parent / "home", repo)


@pytest.mark.parametrize("profile", ["local", "server", "cluster"])
def test_each_profile_of_the_project_passes_its_own_guards(
    repo: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_PROFILE", profile)
    assert read(repo)["project"] == "flights"


def test_an_unknown_profile_is_answered_with_those_there_are(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_PROFILE", "../server")
    with pytest.raises(ConfigurationError, match=r"'\.\./server'.*cluster, local, server"):
        profile_file(repo)


def test_missing_variables_are_all_named_before_anything_is_opened(server: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="variables FALAJ_REDIS, FALAJ_REGISTRY_URL, which are not set"
    ):
        read(server, {"FALAJ_REDIS": ""})
    assert not (server.parent / "home").exists()


def test_a_value_of_the_environment_cannot_add_settings(server: Path) -> None:
    password = "a: b # c\nskip_dedup: true $HOME ${PATH}"
    described = read(server, {**ENVIRONMENT, "FALAJ_REDIS": f"{REDIS},password={password}"})
    assert described["online_store"]["connection_string"] == f"{REDIS},password={password}"
    assert "skip_dedup" not in described["online_store"]


@pytest.mark.parametrize(
    "kind",
    [
        "dask",
        "file",
        None,
        "feast.infra.offline_stores.file.FileOfflineStore",
        "somebody.else.MyDaskOfflineStore",
    ],
)
def test_a_store_that_loses_rows_is_refused_by_any_name_and_inside_another(
    repo: Path, kind: str | None
) -> None:
    inside = {"type": "hybrid", "stores": [{"type": kind, "conf": {}}]}
    for path, value in (("offline_store.type", kind), ("offline_store", inside)):
        change(repo / "feature_store.yaml", path, value)
        with pytest.raises(ConfigurationError, match="drops entity rows"):
            read(repo)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("registry.serve_features_while_materializing", False, "readers are refused"),
        ("registry.serve_while_materializing", True, "registry.serve_while_materializing"),
        ("registry.registry_type", "file", "registry.registry_type.*'sql'"),
        ("materialisation", {"pull_latest_features": True}, "materialisation"),
        ("materialization.pull_latest_features", None, "pulls the whole range"),
        ("materialization.online_write_batch_size", None, "Python objects of all rows"),
        ("materialization.online_write_batch_size", 10**9, "less than or equal to 100000"),
        ("entity_key_serialization_version", 2, "should be 3.*never found again"),
        ("online_store.skip_dedup", True, "older value overwrite a newer one"),
        ("online_store.type", "sqlite", "older value overwrite a newer one"),
        ("online_store.type", "redis", "NewerWinsRedisOnlineStore"),
        ("offline_store", None, "drops entity rows"),
        ("provider", "local", "writes no audit"),
        ("audit", None, "audit: Field required"),
        ("audit.path", None, "nothing would be audited"),
        ("project", None, "project: Field required"),
        ("flags", {"alpha_features": True}, "flags"),
    ],
)
def test_an_unsafe_setting_is_refused_with_a_reason(
    repo: Path, path: str, value: Any, said: str
) -> None:
    change(repo / "feature_store.yaml", path, value)
    with pytest.raises(ConfigurationError, match=said):
        read(repo)


@pytest.mark.parametrize("mode", [None, "sync"])
def test_a_registry_over_the_network_must_not_reload_inside_a_request(
    server: Path, mode: str | None
) -> None:
    change(server / "profiles" / "server.yaml", "registry.cache_mode", mode)
    with pytest.raises(ConfigurationError, match="cache_mode must be thread"):
        read(server)


POSTGRES = [
    ("postgresql+psycopg://u:secret@db.example/feast", "sslmode unset"),
    ("postgresql://u:secret@db.example/feast?sslmode=disable", "sslmode disable"),
    ("postgresql+psycopg://u:secret@/feast?host=db.example", "on db.example"),
    ("postgresql+psycopg://u:secret@localhost.evil.example/feast", "localhost.evil.example"),
]
REDISES = [
    ("cache.example:6379,password=secret", "without ssl=true"),
    ("cache.example:6379,ssl=True,password=secret", "without ssl=true"),
    ("cache.example:6379,ssl=true", "without a password"),
    ("cache.example:6379,ssl=true,ssl_cert_reqs=none,password=secret", "not check the cert"),
    ("127.0.0.1:6379,cache.example:6379,password=secret", "Redis on cache.example"),
    ("127.0.0.1:6379,pasword=secret", "unknown option pasword"),
    ("127.0.0.1:6379,password=sec,ret", "must hold no comma"),
    ("127.0.0.1", "host:port"),
    ("[::1]:6379", "knows no IPv6"),
]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        *(("FALAJ_REGISTRY_URL", *each) for each in POSTGRES),
        *(("FALAJ_REDIS", *each) for each in REDISES),
    ],
)
def test_servers_must_be_encrypted_and_closed_unless_they_are_on_this_machine(
    server: Path, variable: str, value: str, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        read(server, {**ENVIRONMENT, variable: value})
    assert "secret" not in str(raised.value)


def test_an_encrypted_state_asks_redis_by_tls_1_3_alone(server: Path) -> None:
    url = "redis.example:6379,ssl=true,password=secret"
    found = read(server, {**ENVIRONMENT, "FALAJ_REDIS": url, "FALAJ_ENCRYPTION": "state"})
    asked = found["online_store"]["connection_string"]
    (_, options) = RedisOnlineStore._parse_connection_string(asked)
    connection = redis.Redis(**options).connection_pool.make_connection()
    assert connection.ssl_min_version == TLSVersion.TLSv1_3


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "\x00"])
def test_a_file_that_is_no_settings_is_refused(repo: Path, text: str) -> None:
    (repo / "feature_store.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"feature_store\.yaml"):
        read(repo)


def test_a_damaged_registry_is_named_and_can_be_removed(tmp_path: Path) -> None:
    repo = SmallRepository(tmp_path, num_days=1).path
    registry = tmp_path / "home" / "feast" / "registry.db"
    registry.parent.mkdir(parents=True)
    registry.write_bytes(b"no database" * 1000)
    with pytest.raises(FeatureStoreError, match=f"the registry {registry} cannot.*remove this"):
        open_store(tmp_path / "home", repo)
    shutil.rmtree(registry.parent)
    assert open_store(tmp_path / "home", repo).list_feature_views() == []


def test_the_configuration_that_an_earlier_version_kept_with_a_snapshot_is_read(
    tmp_path: Path,
) -> None:
    config = SmallRepository(tmp_path, num_days=1).config
    kept = config.model_dump(mode="json")
    kept |= {"skew": {"max_differing_share": 0.0}, "threads": 4}
    kept |= {"parity": {"seed": 3}, "memory_limit_mb": 1000}
    kept["training_set"]["event_time"] = "event_timestamp"
    kept["online"] |= {"first_pause_s": 0.5, "age_bounds_s": [60, 300]}
    assert recorded_config(json.dumps(kept)) == config
