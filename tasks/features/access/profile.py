"""Profiles: which stores an installation uses, read from one YAML file and checked before use.

`local` is `feature_store.yaml` of the feature repository, any other profile `profiles/<name>.yaml`
beside it. The files are Feast's own, so its command line reads them too. Secrets and addresses come
from the environment (`${NAME}`). Everything here runs before a store, file or connection is opened,
and without importing Feast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tasks.features.access.addresses import postgres_refusal, redis_refusal
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import DEFAULT_PROFILE, Settings

ASOF_STORE = "tasks.features.offline.store.AsofDuckDBOfflineStore"
AUDITED_PROVIDER = "tasks.features.access.provider.AuditedProvider"
ATOMIC_STORE = "tasks.features.access.store.AtomicFileRegistryStore"
LOSSY_STORES = re.compile(r"^(dask|file)$|dask|\.file(offlinestore)?$|fileofflinestore", re.I)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
MAX_BATCH_ROWS = 100_000

KEYS = {
    "": {
        "project",
        "project_description",
        "provider",
        "registry",
        "online_store",
        "offline_store",
        "batch_engine",
        "feature_server",
        "materialization",
        "entity_key_serialization_version",
        "data_quality_monitoring",
        "audit",
        "coerce_tz_aware",
    },
    "registry": {
        "registry_type",
        "registry_store_type",
        "path",
        "read_path",
        "cache_ttl_seconds",
        "cache_mode",
        "s3_additional_kwargs",
        "enable_online_feature_view_versioning",
        "serve_features_while_materializing",
        "sqlalchemy_config_kwargs",
        "thread_pool_executor_worker_count",
    },
    "materialization": {"pull_latest_features", "online_write_batch_size"},
    "audit": {"path"},
}
"""Keys that Feast itself would pass over in silence when they are misspelt; its stores do check."""


def profile_file(repo: Path) -> Path:
    """The file of the profile that `FALAJ_PROFILE` names.

    Raises:
        ConfigurationError: there is no such profile; the sentence lists those there are.
    """
    name = Settings.from_environment().profile
    files = {DEFAULT_PROFILE: repo / "feature_store.yaml"}
    files |= {file.stem: file for file in sorted((repo / "profiles").glob("*.yaml"))}
    if name not in files:
        raise ConfigurationError(
            f"profile {name!r} (FALAJ_PROFILE) does not exist; there are: {', '.join(files)}. "
            f"Name one of these or write {repo.name}/profiles/{name}.yaml. Nothing was opened"
        )
    return files[name]


def read_profile(
    home: Path, repo: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the profile says, with the environment's values in place and every guard passed.

    Args:
        home: state folder, `${FALAJ_HOME}` in the file.
        repo: feature repository.
        environment: values for `${NAME}`; None for those of this process.

    Raises:
        ConfigurationError: the file is missing or wrong, names a variable that is not set, or asks
            for something that loses rows, lets stale values win or sends secrets unencrypted.
    """
    file = profile_file(repo)
    try:
        described = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigurationError(
            f"{file.name} cannot be read ({exc}); expected Feast's YAML. Nothing was opened"
        ) from exc
    if not isinstance(described, dict):
        raise ConfigurationError(
            f"{file.name} holds no settings; expected Feast's YAML. Nothing was opened"
        )
    values = {**(os.environ if environment is None else environment), "FALAJ_HOME": str(home)}
    missing: set[str] = set()
    filled: dict[str, Any] = _fill(described, values, missing)
    if missing:
        raise ConfigurationError(
            f"{file.name} needs the environment variable{'s' if len(missing) > 1 else ''} "
            f"{', '.join(sorted(missing))}, which {'are' if len(missing) > 1 else 'is'} not set; "
            "export what the file's comments describe. Nothing was opened"
        )
    for refusal in _refusals(filled):
        raise ConfigurationError(f"{file.name}: {refusal}. Nothing was opened")
    return filled


def _fill(value: Any, values: Mapping[str, str], missing: set[str]) -> Any:
    """Put the environment's values into texts, after parsing: no value can add YAML of its own."""
    if isinstance(value, dict):
        return {key: _fill(item, values, missing) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, values, missing) for item in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not values.get(name):
            missing.add(name)
        return values.get(name, "")

    return VARIABLE.sub(found, value)


def _refusals(described: dict[str, Any]) -> Iterator[str]:
    """Sentences that say what is wrong, the first of which is shown."""
    yield from _unknown_keys(described)
    yield from _wrong_sections(described)
    yield from _offline_refusals(described["offline_store"])
    yield from _online_refusals(described["online_store"])
    yield from _registry_refusals(described["registry"])
    yield from _materialization_refusals(described["materialization"])
    engine = described.get("batch_engine")
    if isinstance(engine, dict) and "equal_times" in engine:
        yield "batch_engine.equal_times is no setting any more: corrections always win; remove it"
    if described["registry"]["registry_type"] == "file" and (
        "connection_string" in described["online_store"]
    ):
        yield "a registry in a file serves one machine; use registry_type sql beside Redis"
    if described["provider"] != AUDITED_PROVIDER:
        yield f"provider is {described['provider']}, which writes no audit; use {AUDITED_PROVIDER}"
    version = described.get("entity_key_serialization_version")
    if version != 3:
        yield (
            f"entity_key_serialization_version is {version}, expected 3: keys written in another "
            "form are never found again"
        )


def _unknown_keys(described: dict[str, Any]) -> Iterator[str]:
    for section, known in KEYS.items():
        part = described.get(section) if section else described
        unknown = sorted(set(part) - known) if isinstance(part, dict) else []
        if unknown:
            yield (
                f"unknown key {', '.join(map(str, unknown))}{f' in {section}' if section else ''}, "
                f"which Feast would pass over in silence; known are {', '.join(sorted(known))}"
            )


def _wrong_sections(described: dict[str, Any]) -> Iterator[str]:
    for name in ("project", "provider"):
        if not isinstance(described.get(name), str):
            yield f"{name} is missing"
    if not isinstance(described.get("offline_store"), dict):
        yield _lossy(described.get("offline_store"))
    for name in ("registry", "online_store", "materialization", "audit"):
        if not isinstance(described.get(name), dict):
            yield f"section {name} is missing; see the profiles that come with the project"
    if not described.get("audit", {}).get("path"):
        yield "audit has no path, so nothing would be audited"


def _lossy(kind: object) -> str:
    return (
        f"names offline store {kind or 'dask (the default)'}, which drops entity rows without a "
        f"word; use {ASOF_STORE}"
    )


def _offline_refusals(offline: dict[str, Any]) -> Iterator[str]:
    for kind in (offline.get("type"), *_nested_types(offline)):
        if not isinstance(kind, str) or LOSSY_STORES.search(kind):
            yield _lossy(kind)


def _nested_types(value: Any) -> Iterator[object]:
    """Every `type` below the first level: a store may be made of other stores."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict) and "type" in item:
            yield item["type"]
        if isinstance(item, dict | list):
            yield from _nested_types(item)


def _online_refusals(online: dict[str, Any]) -> Iterator[str]:
    if not isinstance(online.get("type"), str):
        yield "online_store has no type"
        return
    if online.get("skip_dedup"):
        yield "online_store.skip_dedup lets an older value overwrite a newer one; remove it"
    if online["type"] == "sqlite":
        yield (
            "online store sqlite lets an older value overwrite a newer one; use "
            "tasks.features.online.sqlite_store.NewerWinsSqliteOnlineStore"
        )
    if online["type"] == "redis":
        yield (
            "online store redis drops a pushed correction of the same event time and cannot take "
            "back what a corrected table no longer has; use "
            "tasks.features.online.redis_store.NewerWinsRedisOnlineStore, which reads what is there"
        )
    if online.get("redis_type", "redis") not in ("redis", "redis_cluster"):
        yield f"online_store.redis_type is {online['redis_type']}, expected redis or redis_cluster"
    if address := online.get("connection_string"):
        yield from redis_refusal(str(address))
    if host := online.get("host"):
        sslmode = str(online.get("sslmode", "require"))
        yield from postgres_refusal(f"postgresql://{host}/?sslmode={sslmode}", "online_store")


def _registry_refusals(registry: dict[str, Any]) -> Iterator[str]:
    kind = registry.get("registry_type")
    path = str(registry.get("path", ""))
    if registry.get("serve_features_while_materializing") is not True:
        yield (
            "registry.serve_features_while_materializing must be true: without it readers are "
            "refused while a view is written, and for good when the writer is killed"
        )
    if kind == "file" and registry.get("registry_store_type") != ATOMIC_STORE:
        yield (
            "registry_type file rewrites its only copy in place; add registry_store_type: "
            f"{ATOMIC_STORE}, or use registry_type sql"
        )
    if kind not in ("sql", "file"):
        yield f"registry_type is {kind}, expected sql (or file for a single machine)"
    for name in ("path", "read_path"):
        yield from postgres_refusal(str(registry.get(name) or ""), f"registry.{name}")
    if kind == "sql" and not path.startswith("sqlite") and registry.get("cache_mode") != "thread":
        yield (
            "registry.cache_mode must be thread for a registry over the network: sync reloads all "
            "of it inside a reader's request"
        )


def _materialization_refusals(materialization: dict[str, Any]) -> Iterator[str]:
    if materialization.get("pull_latest_features") is not True:
        yield (
            "materialization.pull_latest_features must be true: the default pulls the whole range "
            "into memory"
        )
    rows = materialization.get("online_write_batch_size")
    if not isinstance(rows, int) or isinstance(rows, bool) or not 0 < rows <= MAX_BATCH_ROWS:
        yield (
            f"materialization.online_write_batch_size is {rows}, expected 1 to {MAX_BATCH_ROWS:,} "
            "rows: the default turns all rows into Python objects at once"
        )
