"""What an engine is asked to do: models, hardware, and how much of both."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServedModel(_Config):
    """One model of the registry that this process serves: how it is followed and checked."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$", description="In the registry.")
    alias: str = Field(default="champion", min_length=1, description="Names the stable version.")
    on_move: Literal["swap", "offer"] = Field(
        default="swap",
        description="What a moved alias does: `swap` serves the new version at once, `offer` loads "
        "it as candidate and leaves the rest to the release flow.",
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


class HardwareConfig(_Config):
    """One kind of hardware that this process computes on."""

    name: str = Field(default="cpu", min_length=1, description="As answers and counters name it.")
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


class EngineConfig(_Config):
    """What the engine computes on, and how much it holds."""

    hardware: tuple[HardwareConfig, ...] = Field(
        default=(HardwareConfig(),), min_length=1, description="The preferred one first."
    )
    batch_rows: PositiveInt = Field(
        default=256, description="Of one batch; a request with more is computed alone."
    )
    max_versions: PositiveInt = Field(
        default=8, description="Loaded versions of all models; memory is bounded by it."
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [one.name for one in self.hardware]
        if len(set(names)) != len(names):
            raise ValueError(f"hardware {names} names one twice; name each once")
        return self
