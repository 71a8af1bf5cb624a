"""Profiles: which stores an installation uses, read from one YAML file and checked before use.

`local`, `server` and `cluster` are in the folder `profiles` beside this module. A repository may
have its own: `local` as `feature_store.yaml`, any other as `profiles/<name>.yaml`. The files are
Feast's own, so its command line reads them too. Secrets and addresses come from the environment
(`${NAME}`), and so do the state folder, and the project in the built-in ones. Everything here runs
before a store, file or connection is opened, and without importing Feast. Messages name hosts and
options, never a user or a password.
"""

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import wraps
from inspect import Parameter, isclass, signature
from pathlib import Path
from ssl import TLSVersion
from typing import Any, Literal, Self, get_type_hints
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.governance.handling import Placement
from tasks.governance.policy import require_placements
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.kernel.settings import DEFAULT_PROFILE, Settings, state_of
from tasks.kernel.tenants import tenant_of
from tasks.kernel.values import is_loopback

ASOF_STORE = "tasks.features.offline.store.AsofDuckDBOfflineStore"
LOSSY_STORES = re.compile(r"^(dask|file)$|dask|\.file(offlinestore)?$|fileofflinestore", re.I)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_MANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
ENCRYPTED_POSTGRES = ("require", "verify-ca", "verify-full")
REDIS_OPTIONS = {
    *("ssl", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"),
    *("username", "password", "db", "socket_timeout", "socket_connect_timeout"),
    *("health_check_interval", "skip_full_coverage_check"),
}
STORES_THAT_LOSE = {
    "sqlite": "lets an older value overwrite a newer one; use "
    "tasks.features.online.sqlite_store.NewerWinsSqliteOnlineStore",
    "redis": "drops a pushed correction of the same event time; use "
    "tasks.features.online.redis_store.NewerWinsRedisOnlineStore, which reads what is there",
}


class _Section(BaseModel):
    """Keys that Feast itself would pass over when they are misspelt; its stores do check."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Registry(_Section):
    registry_type: Literal["sql"]
    path: str
    read_path: str | None = None
    cache_ttl_seconds: int = 600
    cache_mode: str | None = None
    enable_online_feature_view_versioning: bool = False
    serve_features_while_materializing: Literal[True] = Field(
        description="without it readers are refused while a view is written"
    )
    sqlalchemy_config_kwargs: dict[str, Any] = {}
    thread_pool_executor_worker_count: int = 0

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        for name in ("path", "read_path"):
            _raise_first(postgres_refusal(getattr(self, name) or "", name))
        if not self.path.startswith("sqlite") and self.cache_mode != "thread":
            raise ValueError(
                "cache_mode must be thread for a registry over the network: sync reloads all of it "
                "inside a reader's request"
            )
        return self


class _Engine(_Section):
    type: Literal["tasks.features.online.vector_engine.VectorComputeEngine"] = Field(
        description="any other does not say what it wrote"
    )
    backend: str = "pandas"


class _Materialization(_Section):
    pull_latest_features: Literal[True] = Field(
        description="the default pulls the whole range into memory"
    )
    online_write_batch_size: int = Field(
        gt=0, le=100_000, description="the default makes Python objects of all rows at once"
    )


class _Audit(_Section):
    path: str = Field(min_length=1, description="else nothing would be audited")


class _Profile(_Section):
    project: str
    project_description: str | None = None
    provider: Literal["tasks.features.access.provider.AuditedProvider"] = Field(
        description="any other writes no audit"
    )
    registry: _Registry
    online_store: dict[str, Any]
    offline_store: dict[str, Any] = Field(
        description=f"the default, dask, drops entity rows; use {ASOF_STORE}"
    )
    batch_engine: _Engine
    feature_server: dict[str, Any] | None = None
    materialization: _Materialization
    entity_key_serialization_version: Literal[3] = Field(
        description="keys written in another form are never found again"
    )
    data_quality_monitoring: Any = None
    audit: _Audit
    coerce_tz_aware: bool = True

    @model_validator(mode="after")
    def _stores_lose_nothing(self) -> Self:
        for kind in (self.offline_store.get("type"), *_nested_types(self.offline_store)):
            if not isinstance(kind, str) or LOSSY_STORES.search(kind):
                raise ValueError(
                    f"offline store {kind or 'dask (the default)'} drops entity rows without a "
                    f"word; use {ASOF_STORE}"
                )
        _raise_first(_online_refusals(self.online_store))
        return self


def profile_file(repo: Path) -> Path:
    """The file of the profile that `FALAJ_PROFILE` names.

    Raises:
        ConfigurationError: there is no such profile; the message lists those there are.
    """
    name = Settings.from_environment().profile
    folders = (Path(__file__).with_name("profiles"), repo / "profiles")
    files = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    if (own := repo / "feature_store.yaml").exists():
        files[DEFAULT_PROFILE] = own
    if name not in files:
        raise ConfigurationError(
            f"profile {name!r} (FALAJ_PROFILE) does not exist; there are: {', '.join(files)}. "
            f"Name one of these or write {repo.name}/profiles/{name}.yaml. Nothing was opened"
        )
    return files[name]


def read_profile(home: Path, repo: Path) -> dict[str, Any]:
    """What the profile says, with the environment's values in place and every guard passed.

    Args:
        home: state folder, `${FALAJ_HOME}` in the file.
        repo: feature repository; `${FALAJ_PROJECT}` in a built-in file is its use case,
            and the tenant: a registry and Redis name everything by project.

    Raises:
        ConfigurationError: the file is missing or wrong, names a variable that is not set, or asks
            for something that loses rows, lets stale values win or sends secrets unencrypted.
        PlacementRefusedError: features of this data may not be in its stores.
    """
    file = profile_file(repo)
    described = read_yaml(file, file.name)
    values = {**os.environ, "FALAJ_HOME": str(home)}
    if not file.is_relative_to(repo):
        named = (Settings(home, repo).use_case, tenant_of(state_of(home)))
        values["FALAJ_PROJECT"] = "__".join(filter(None, named)).replace("-", "_")
    missing: set[str] = set()
    filled: dict[str, Any] = _fill(described, values, missing)
    if missing:
        raise ConfigurationError(
            f"{file.name} needs the environment variable{'s' if len(missing) > 1 else ''} "
            f"{', '.join(sorted(missing))}, which {'are' if len(missing) > 1 else 'is'} not set; "
            "export what the file's comments describe. Nothing was opened"
        )
    try:
        _Profile.model_validate(filled)
    except ValidationError as exc:  # its own text would show passwords
        faults = "; ".join(_described(dict(e)) for e in exc.errors(include_input=False))
        raise ConfigurationError(f"{file.name}: {faults}. Nothing was opened") from None
    online, registry = filled["online_store"].get("connection_string"), filled["registry"]["path"]
    if online or "://" in registry:
        asked = [Placement("features", each) for each in (online, registry) if each]
        require_placements(Settings(home, repo), asked)
    if os.environ.get(ENCRYPTION) and "ssl=true" in str(online).split(","):
        filled["online_store"]["connection_string"] += f",ssl_min_version={TLSVersion.TLSv1_3:d}"
    journal = state_of(home) / "audit"
    if Path(filled["audit"]["path"]) not in (home / "audit", journal):
        seen = f"{file.name}: audit.path is {filled['audit']['path']}, expected"
        raise ConfigurationError(
            f"{seen} ${{FALAJ_HOME}}/audit, the one journal. Nothing was opened"
        )
    filled["audit"]["path"] = str(journal)
    return filled


def _described(fault: dict[str, Any]) -> str:
    """A fault with the reason why the setting is asked for."""
    model: Any = _Profile
    why = ""
    for name in fault["loc"]:
        field = getattr(model, "model_fields", {}).get(name)
        model, why = (field.annotation, field.description) if field else (None, "")
    message = fault["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, fault['loc']))}: {message}{f' ({why})' if why else ''}".lstrip(": ")


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


def _nested_types(value: Any) -> Iterator[object]:
    """Every `type` below the first level: a store may be made of other stores."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict) and "type" in item:
            yield item["type"]
        if isinstance(item, dict | list):
            yield from _nested_types(item)


def _online_refusals(online: dict[str, Any]) -> Iterator[str]:
    kind = online.get("type")
    if not isinstance(kind, str):
        yield "online_store has no type"
    elif kind in STORES_THAT_LOSE:
        yield f"online store {kind} {STORES_THAT_LOSE[kind]}"
    if online.get("skip_dedup"):
        yield "online_store.skip_dedup lets an older value overwrite a newer one; remove it"
    if online.get("redis_type", "redis") not in ("redis", "redis_cluster"):
        yield f"online_store.redis_type is {online['redis_type']}, expected redis or redis_cluster"
    if address := online.get("connection_string"):
        yield from redis_refusal(str(address))
    if host := online.get("host"):
        sslmode = str(online.get("sslmode", "require"))
        yield from postgres_refusal(f"postgresql://{host}/?sslmode={sslmode}", "online_store")


def _raise_first(refusals: Iterator[str]) -> None:
    for refusal in refusals:
        raise ValueError(refusal)


def postgres_refusal(url: str, place: str) -> Iterator[str]:
    """What is wrong with a PostgreSQL URL; nothing for any other kind of URL.

    The client's own default (`prefer`) falls back to clear text in silence, so the mode must be
    said.
    """
    if not url.startswith("postgres"):
        return
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    hosts = [parts.hostname or "", *options.get("host", [])]
    mode = options.get("sslmode", [""])[0]
    remote = [host for host in hosts if host and not is_loopback(host) and host[0] != "/"]
    if remote and mode not in ENCRYPTED_POSTGRES:
        yield (
            f"{place} connects to PostgreSQL on {remote[0]} with sslmode "
            f"{mode or 'unset'}, expected one of {', '.join(ENCRYPTED_POSTGRES)}: anything else "
            "sends the password and the data unencrypted. Only loopback may go without"
        )


def redis_parts(connection_string: str) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Hosts with ports, and options, of Feast's form `host:port,option=value,...`.

    Raises:
        ValueError: a part is neither, or no host is named.
    """
    parts = [part.strip() for part in connection_string.split(",")]
    options = dict(part.split("=", 1) for part in parts if "=" in part)
    hosts = [part.rpartition(":") for part in parts if "=" not in part]
    if not hosts or not all(host and ":" not in host for host, _, _ in hosts):
        raise ValueError("no host:port")  # Feast splits at every colon, so it knows no IPv6
    return [(host, int(port)) for host, _, port in hosts], options


def redis_refusal(connection_string: str) -> Iterator[str]:
    """What is wrong with Feast's Redis connection string: `host:port,option=value,...`."""
    try:
        nodes, options = redis_parts(connection_string)
    except ValueError:
        yield (
            "online_store.connection_string is not host:port,option=value,... (Feast knows no IPv6 "
            "address here, and a password must hold no comma, which Feast splits it at)"
        )
        return
    if unknown := sorted(options.keys() - REDIS_OPTIONS):
        yield (
            f"online_store.connection_string has unknown option {', '.join(unknown)}; known are "
            f"{', '.join(sorted(REDIS_OPTIONS))}"
        )
    remote = [host for host, _ in nodes if not is_loopback(host)]
    if remote and options.get("ssl") != "true":
        yield (
            f"online_store connects to Redis on {remote[0]} without ssl=true, which sends the "
            "password and the features unencrypted. Only loopback may go without"
        )
    elif remote and options.get("ssl_cert_reqs", "required") != "required":
        yield f"online_store does not check the certificate of Redis on {remote[0]}"
    elif remote and not options.get("password"):
        yield f"online_store connects to Redis on {remote[0]} without a password"


def import_feast() -> None:
    """Import Feast lean; does nothing where it is imported already.

    The type checks that typeguard adds to every method of Feast's classes compile each of them
    again: 4 of 6 s of CPU. What definitions are made with is checked all the same, see `_checked`;
    what other methods are called with is not. PyTorch, which Feast takes where it is there, is 150
    MB more for a process that stays. Whatever needs PyTorch or typeguard later has them whole.
    """
    if "feast" in sys.modules:
        return
    import typeguard

    typechecked, torch = typeguard.typechecked, sys.modules.get("torch")
    typeguard.typechecked = _checked  # type: ignore[assignment]
    if torch is None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        importlib.import_module("feast")
    finally:
        typeguard.typechecked = typechecked
        if torch is None:
            del sys.modules["torch"]


def _checked(target: Any) -> Any:
    """As `typeguard.typechecked`, for what a class is made with alone, and without compiling it."""
    if not isclass(target) or "__init__" not in vars(target):
        return target
    make = target.__init__
    parameters = signature(make)

    @wraps(make)
    def checked(*args: Any, **kwargs: Any) -> None:
        from typeguard import TypeCheckError, check_type

        hints = get_type_hints(make)
        try:
            given = parameters.bind(*args, **kwargs).arguments
        except TypeError:
            given = {}  # the call itself says what is wrong with it
        for name, value in given.items():
            if name in hints and parameters.parameters[name].kind not in _MANY:
                try:
                    check_type(value, hints[name])
                except TypeCheckError as exc:
                    raise TypeError(f"{target.__name__}, argument {name!r}: {exc}") from None
        make(*args, **kwargs)

    target.__init__ = checked  # type: ignore[method-assign]
    return target
