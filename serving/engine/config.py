"""What an engine is asked to do: models, hardware, bounds of its queues, when it falls over."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FollowedModel(_Config):
    """How a model is followed and checked, whoever names it."""

    on_move: Literal["swap", "offer", "hold"] = Field(
        default="swap",
        description="What a moved alias `champion` does: `swap` serves the new version at once, "
        "`offer` loads it as candidate and leaves the rest to the release flow, `hold` only tells.",
    )
    goal_ms: PositiveFloat = Field(
        default=50.0,
        le=60_000,
        description="Latency goal, p99. A request that would wait longer than half of it is "
        "refused (503), unless it fits into the next batches.",
    )
    golden_rows: Path | None = Field(
        default=None,
        description="NumPy archive (.npz) with an array for each input: rows that every version is "
        "checked on before it serves. None makes rows of the signature.",
    )
    bounds: dict[str, PositiveFloat] = Field(
        default={},
        description="Largest gap that a variant's golden answers may have, by precision; the rest "
        "is as conversion bounds it.",
    )


class ServedModel(FollowedModel):
    """A model that is loaded when the process starts."""

    name: str = Field(min_length=1, description="In the registry.")
    alias: str = Field(default="champion", min_length=1, description="Names the stable version.")


class HardwareConfig(_Config):
    """One kind of hardware that this process computes on."""

    name: str = Field(default="cpu", min_length=1, description="As answers and counters tell it.")
    hardware_class: str = Field(
        default="cpu", min_length=1, description="That variants were judged for."
    )
    goal: str = Field(
        default="one-row", description="Goal of the conversion whose chosen variant serves."
    )
    variants: tuple[str, ...] = Field(
        default=(), description="Serve the first of these that was kept, whatever the goal says."
    )
    threads: PositiveInt = Field(default=1, description="Within one call of the runtime.")
    workers: PositiveInt = Field(
        default=2, description="Batches that may run beside each other, of different models."
    )


class PlacementConfig(_Config):
    """When a batch leaves the hardware that is preferred: the first one that has the model."""

    latency_goal_ms: PositiveFloat = Field(
        default=50.0, description="Expected wait in the queue, above which the others help."
    )
    queued_requests: PositiveInt = Field(
        default=64, description="Requests in the queue of a slot, above which the others help."
    )
    large_rows: PositiveInt | None = Field(
        default=None,
        description="Batches of at least so many rows go to whatever computes them fastest; None: "
        "size alone moves nothing.",
    )
    gain: float = Field(
        default=1.3, ge=1.0, description="How many times faster that has to be, to move for it."
    )
    release: float = Field(
        default=0.5, gt=0, lt=1, description="Part of both bounds, below which help ends."
    )
    settle_s: PositiveFloat = Field(default=1.0, description="How long it has to be below.")
    open_s: PositiveFloat = Field(
        default=1.0, description="How long a backend that failed gets no batch; then it is probed."
    )
    most_open_s: PositiveFloat = Field(
        default=30.0, description="The same after many failures in a row; each doubles it."
    )


class QueueConfig(_Config):
    """Bounds of what waits. Past them a request is refused at once."""

    requests: PositiveInt = Field(default=256, description="Of one slot of a model.")
    rows: PositiveInt = Field(default=65_536, description="Of one slot of a model.")
    total_requests: PositiveInt = Field(
        default=1024, description="Of the process; past it mirrored requests are dropped first."
    )
    total_rows: PositiveInt = Field(default=262_144, description="The same in rows.")
    shadow_share: float = Field(
        default=0.25, gt=0, le=1, description="Part of a slot's bounds that mirrored requests get."
    )


class BatchConfig(_Config):
    """How requests are computed together. Nothing waits for others to come."""

    rows: PositiveInt = Field(
        default=256, description="Of one batch; a request with more is computed alone."
    )
    inline_ms: PositiveFloat = Field(
        default=1.5,
        le=20,
        description="A batch that is expected to take less runs on the event loop's thread.",
    )
    limit_s: PositiveFloat = Field(
        default=30.0,
        description="A batch on a thread that takes longer is given up: its backend counts as "
        "failed, and its calls go to another one.",
    )


class EngineConfig(_Config):
    """Everything that an engine is told."""

    models: tuple[ServedModel, ...] = Field(default=(), description="What is loaded.")
    hardware: tuple[HardwareConfig, ...] = Field(
        default=(HardwareConfig(),), min_length=1, description="The preferred one first."
    )
    program: Literal["never", "last_resort"] = Field(
        default="never",
        description="Whether the registered program itself answers, in PyTorch, where a version "
        "has no variant that could.",
    )
    placement: PlacementConfig = PlacementConfig()
    queue: QueueConfig = QueueConfig()
    batch: BatchConfig = BatchConfig()
    keep_warm: NonNegativeInt = Field(
        default=1, description="Former stable versions of a model that stay loaded."
    )
    max_versions: PositiveInt = Field(
        default=8, description="Loaded versions of all models; memory is bounded by it."
    )
    poll_s: PositiveFloat = Field(default=3.0, description="Between two looks at the registry.")
    retry_s: PositiveFloat = Field(
        default=5.0, description="Until a version that could not be loaded is tried again."
    )
    most_retry_s: PositiveFloat = Field(
        default=300.0, description="The same after many failures; each doubles it."
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for what, names in (
            ("models", [model.name for model in self.models]),
            ("hardware", [one.name for one in self.hardware]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{what} names {names}: something is there twice; name each once")
        return self
