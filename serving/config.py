"""What one serving process is asked to do: one value, read from the feature repository."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from serving.engine.config import FollowedModel
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import USE_CASE_FILE, Settings
from tasks.registry.config import RegistryConfig

SERVING_FILE = "serving.yaml"
_MIB = 2**20
Section = TypeVar("Section", bound=BaseModel)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServedModel(FollowedModel):
    """One model of the registry that this process serves."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$", description="In the registry.")


class HttpConfig(_Section):
    """The public HTTP listener."""

    port: NonNegativeInt = Field(default=8000, le=65_535, description="0 takes a free one.")
    max_body_bytes: PositiveInt = Field(
        default=16 * _MIB, le=2**30, description="Largest body of a request; 413 beyond."
    )
    max_header_bytes: PositiveInt = Field(
        default=32_768, ge=1024, le=_MIB, description="Request line and headers; 431 beyond."
    )
    max_headers: PositiveInt = Field(default=100, le=1000, description="Headers of a request.")
    max_connections: PositiveInt = Field(
        default=1000, le=100_000, description="Open at a time; one more is answered 503."
    )
    max_buffered_bytes: PositiveInt = Field(
        default=256 * _MIB, description="Bodies being received, all together; 503 beyond."
    )
    request_timeout_s: PositiveFloat = Field(
        default=20.0, le=3600, description="Time for a request to arrive whole; 408 after."
    )
    keep_alive_s: PositiveFloat = Field(
        default=75.0, le=86_400, description="Idle connections are closed after; above a proxy's."
    )
    write_timeout_s: PositiveFloat = Field(
        default=30.0, le=3600, description="A client that does not read its answer is cut off."
    )
    slot_header: bool = Field(
        default=True,
        description="Follow `x-falaj-slot`. False where clients reach the server without an edge "
        "that removes the header they send.",
    )


class GrpcConfig(_Section):
    """The gRPC listener."""

    enabled: bool = Field(default=True, description="Whether to listen.")
    port: NonNegativeInt = Field(default=8001, le=65_535, description="0 takes a free one.")
    max_concurrent_calls: PositiveInt = Field(
        default=512, le=100_000, description="Calls at a time; more are refused."
    )


class AdminConfig(_Section):
    """The admin listener, on loopback whatever `host` says."""

    port: NonNegativeInt = Field(default=8002, le=65_535, description="0 takes a free one.")


class ServingConfig(_Section):
    """What one serving process is asked to do."""

    host: str = Field(default="127.0.0.1", description="Address that HTTP and gRPC listen on.")
    models: tuple[ServedModel, ...] = Field(
        default=(),
        description="What to serve; empty for the use case's registered model. `engine.models`, "
        "`engine.hardware` and `engine.poll_s`, where given, go before what is said up here.",
    )
    hardware: str = Field(
        default="cpu", pattern=r"^[a-z][a-z0-9-]*$", description="Hardware class to serve on."
    )
    timeout_s: PositiveFloat = Field(
        default=30.0, le=3600, description="Longest that a request may take, whatever it asks."
    )
    stop_s: PositiveFloat = Field(
        default=20.0, le=600, description="Time for requests in flight when the process ends."
    )
    poll_s: PositiveFloat = Field(
        default=3.0, le=3600, description="Time between looks at the registry."
    )
    open_to_all: bool = Field(
        default=True,
        description="Ask nobody who they are. Only on loopback; elsewhere a guard is needed.",
    )
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()
    admin: AdminConfig = AdminConfig()
    engine: dict[str, Any] = Field(default={}, description="See `serving.engine`.")
    log: dict[str, Any] = Field(default={}, description="See `serving.log`.")
    entities: dict[str, Any] = Field(default={}, description="See `serving.features`.")
    security: dict[str, Any] = Field(default={}, description="See `serving.security`.")
    observability: dict[str, Any] = Field(
        default={},
        validation_alias=AliasChoices("observability", "seeing"),
        description="See `serving.observability`. `seeing` is its former name.",
    )

    @model_validator(mode="after")
    def _models_are_named_once(self) -> Self:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models {names} names one twice; name each once")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = [self.http.port, self.admin.port, *([self.grpc.port] * self.grpc.enabled)]
        fixed = [port for port in ports if port]
        if len(set(fixed)) != len(fixed):
            raise ValueError(f"ports {fixed} are the same twice; give each listener its own, or 0")
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the listeners."""
        return is_loopback(self.host)

    def of_models(self, names: tuple[str, ...]) -> ServingConfig:
        """The same, serving these models."""
        return self.model_copy(update={"models": tuple(ServedModel(name=name) for name in names)})


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def read_serving_config(repo: Path) -> ServingConfig:
    """What `serving.yaml` of a feature repository says; the defaults where there is none.

    Raises:
        ConfigurationError: the file is no YAML, or says something that cannot be.
    """
    file = repo / SERVING_FILE
    try:
        told = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ServingConfig()
    except OSError as exc:
        raise ConfigurationError(f"{file} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{file} is no YAML: {exc}") from exc
    return checked_config({} if told is None else told, str(file))


def registered_model(settings: Settings) -> str:
    """Name under which the use case registers its model.

    Raises:
        ConfigurationError: the feature repository does not say.
    """
    file = settings.feature_repo / USE_CASE_FILE
    settings.use_case  # noqa: B018 (says what is wrong with the file as a whole)
    described: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    try:
        return RegistryConfig.model_validate(described.get("registry") or {}).model_name
    except ValidationError as exc:
        raise ConfigurationError(f"{file}: registry: {exc}. Nothing was started") from exc


def checked_config(told: object, source: str) -> ServingConfig:
    """A configuration from plain data.

    Raises:
        ConfigurationError: it says something that cannot be.
    """
    try:
        return ServingConfig.model_validate(told)
    except ValidationError as exc:
        raise ConfigurationError(f"{source}: {_faults(exc)}. Nothing was started") from exc


def section(name: str, kind: type[Section], told: Mapping[str, Any]) -> Section:
    """A part's section of the configuration.

    Raises:
        ConfigurationError: it says what cannot be.
    """
    try:
        return kind.model_validate(dict(told))
    except ValidationError as exc:
        raise ConfigurationError(
            f"serving.yaml: {_faults(exc, name)}. Nothing was started"
        ) from exc


def _faults(exc: ValidationError, *within: str) -> str:
    """Each setting that cannot be and why, in the words of YAML."""
    return "; ".join(
        f"{'.'.join((*within, *map(str, fault['loc']))) or 'it'}: "
        + fault["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
        for fault in exc.errors()
    )
