"""What one serving process is asked to do: one value, read from the feature repository."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    AnyHttpUrl,
    AwareDatetime,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from serving.security.config import SecuritySection
from tasks.contracts.conversion import MOST_ROWS
from tasks.governance.handling import Address
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import USE_CASE_FILE, Settings
from tasks.kernel.values import Described, checked
from tasks.predictions.config import PredictionLogConfig
from tasks.registry.config import RegistryConfig, named_after

SERVING_FILE = "serving.yaml"
_MIB = 2**20
MAX_HEADERS, MAX_HEADER_BYTES = 100, 32_768
"""Of a request with its first line, 431 beyond: what proxies and servers commonly take."""
MAX_BUFFERED_BYTES = 256 * _MIB
"""Bodies being received, all together; 503 beyond."""


class HttpConfig(Described):
    """The public HTTP listener."""

    port: NonNegativeInt = Field(default=8000, le=65_535, description="0 takes a free one.")
    max_body_bytes: PositiveInt = Field(default=16 * _MIB, le=2**30)
    """Largest body of a request; 413 beyond."""
    max_connections: PositiveInt = Field(default=1000, le=100_000)
    """Open at a time; one more is answered 503."""
    request_timeout_s: PositiveFloat = Field(default=20.0, le=3600)
    """Time for a request to arrive whole (408 after), and for a client to read its answer
    (it is cut off)."""
    keep_alive_s: PositiveFloat = Field(default=75.0, le=86_400)
    """Idle connections are closed after; above a proxy's."""
    track_header: bool = Field(
        default=True, validation_alias=AliasChoices("track_header", "slot_header")
    )
    """Follow `x-falaj-slot`. False where clients reach the server without an edge that removes the
    header they send."""


class GrpcConfig(Described):
    """The gRPC listener."""

    enabled: bool = Field(default=True, description="Whether to listen.")
    port: NonNegativeInt = Field(default=8001, le=65_535, description="0 takes a free one.")
    max_concurrent_calls: PositiveInt = Field(default=512, le=100_000)
    """Calls at a time; more are refused."""


class AdminConfig(Described):
    """The admin listener, on loopback whatever `host` says."""

    port: NonNegativeInt = Field(default=8002, le=65_535, description="0 takes a free one.")


class ServedModel(Described):
    """One model of the registry that this process serves: how it is followed and checked."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$", description="In the registry.")
    alias: str = Field(default="champion", min_length=1, description="Names the stable version.")
    on_move: Literal["swap", "offer"] = "swap"
    """What a moved alias does: `swap` serves the new version at once, `offer` loads it as
    candidate and leaves the rest to the release flow."""
    goal_ms: PositiveFloat = Field(default=50.0, le=60_000)
    """Latency goal, p99. A request that would wait longer than half of it is refused (503),
    unless it fits into the next batches."""
    golden_rows: Path | None = None
    """NumPy archive (.npz) with an array for each input: rows that every version is checked
    on before it serves. None makes rows of the signature."""


class HardwareConfig(Described):
    """One kind of hardware that this process computes on."""

    name: str = Field(default="cpu", min_length=1, description="As answers and counters name it.")
    hardware_class: str = Field(default="cpu", min_length=1)
    """That variants were judged for."""
    goal: str = "one-row"
    """Goal of the conversion whose chosen variant serves."""
    variants: tuple[str, ...] = ()
    """Serve the first of these that was kept, whatever the goal says."""
    threads: PositiveInt = Field(default=1, description="Within one call of the runtime.")
    workers: PositiveInt = 2
    """Batches that may run beside each other, of different models."""


class EngineConfig(Described):
    """What the engine computes on, and how much it holds."""

    hardware: tuple[HardwareConfig, ...] = Field(default=(HardwareConfig(),), min_length=1)
    """The preferred one first."""
    batch_rows: PositiveInt = 256
    """Of one batch; a request with more is computed alone."""
    max_versions: PositiveInt = 8
    """Loaded versions of all models; memory is bounded by it."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [one.name for one in self.hardware]
        if len(set(names)) != len(names):
            raise ValueError(f"hardware {names} names one twice; name each once")
        return self


class EntityConfig(Described):
    """What a serving process does with a request that names entities."""

    moment: Literal["use_case", "wall"] | AwareDatetime = "use_case"
    """Moment at which ages count: the use case's clock, which may replay a year; the wall
    clock; or a moment, as 2014-01-01T05:30:00Z, for trials with recorded data: not before
    the end of what was refreshed, as online is the newest row alone."""
    max_rows: PositiveInt = Field(default=4096, le=MOST_ROWS)
    """Rows of a request, and of requests that share a read."""


class TraceConfig(Described):
    """Where spans go, and of which calls."""

    endpoint: Annotated[AnyHttpUrl | None, Address("traces")] = None
    """OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; None sends nothing.
    Credentials come from OTEL_EXPORTER_OTLP_HEADERS."""
    file: Path | None = None
    """JSON lines, one a span; for places without a collector."""
    ratio: float = Field(default=0.01, ge=0, le=1)
    """Share of calls without a trace of their own that begin one. A call that brings a
    `traceparent` follows its caller's decision."""


class LogConfig(Described):
    """The process's log: JSON lines."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least important line that is written."""
    file: Path | None = Field(default=None, description="None is standard error.")


class ObservabilityConfig(Described):
    """Everything that is shown of one serving process."""

    traces: TraceConfig = TraceConfig()
    logs: LogConfig = LogConfig()


class ServingConfig(Described):
    """What one serving process is asked to do."""

    host: Annotated[str, Address("predictions", prefix="https://")] = Field(
        default="127.0.0.1", description="Address that HTTP and gRPC listen on."
    )
    models: tuple[ServedModel, ...] = ()
    """What to serve; empty for the use case's registered model."""
    timeout_s: PositiveFloat = Field(default=30.0, le=3600)
    """Longest that a request may take, whatever it asks."""
    stop_s: PositiveFloat = Field(default=20.0, le=600)
    """Time for requests in flight when the process ends."""
    poll_s: PositiveFloat = Field(default=3.0, le=3600)
    """Time between looks at the registry."""
    open_to_all: bool = True
    """Ask nobody who they are. Only on loopback; elsewhere a guard is needed."""
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()
    admin: AdminConfig = AdminConfig()
    engine: EngineConfig = EngineConfig()
    log: PredictionLogConfig = PredictionLogConfig()
    entities: EntityConfig = EntityConfig()
    security: SecuritySection = SecuritySection()
    observability: ObservabilityConfig = Field(
        default=ObservabilityConfig(), validation_alias=AliasChoices("observability", "seeing")
    )
    """`seeing` is its former name."""

    @model_validator(mode="after")
    def _names_and_ports_differ(self) -> Self:
        ports = [self.http.port, self.admin.port, *([self.grpc.port] * self.grpc.enabled)]
        for what, seen in (
            ("models", [model.name for model in self.models]),
            ("ports", [port for port in ports if port]),
        ):
            if twice := [one for one, times in Counter[Any](seen).items() if times > 1]:
                raise ValueError(f"{what} {seen} are the same twice: {twice[0]}; name each once")
        return self

    def of_models(self, names: tuple[str, ...]) -> Self:
        """The same, serving these models."""
        return self.model_copy(update={"models": tuple(ServedModel(name=name) for name in names)})


def read_serving_config(repo: Path) -> ServingConfig:
    """What `serving.yaml` of a feature repository says; the defaults where there is none.

    Raises:
        ConfigurationError: the file is no YAML, or says something that cannot be.
    """
    file = repo / SERVING_FILE
    return checked_config(read_yaml(file, str(file)) if file.exists() else {}, str(file))


def registered_model(settings: Settings) -> str:
    """Name under which the use case registers its model.

    Raises:
        ConfigurationError: the feature repository does not say.
    """
    file = settings.feature_repo / USE_CASE_FILE
    name = settings.use_case  # says what is wrong with the file as a whole
    registry = named_after(name) | (read_yaml(file, USE_CASE_FILE).get("registry") or {})
    where = f"{file}: registry"
    return checked(RegistryConfig, registry, where, "Nothing was started").model_name


def checked_config(values: object, source: str) -> ServingConfig:
    """A configuration from plain data.

    Raises:
        ConfigurationError: it says something that cannot be.
    """
    return checked(ServingConfig, values, source, "Nothing was started")
