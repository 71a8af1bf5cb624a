"""Where the stages of a loop are to run: hardware classes and fall-backs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

HardwareClass = Literal["cpu", "gpu"]
StageName = Literal["feature refresh", "training", "conversion", "promotion", "drift check"]


class StageRouting(BaseModel):
    """Which hardware one stage wants, and what happens while no worker there is online."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    hardware_class: HardwareClass = Field(
        default="cpu", description="Class that the stage wants; the name of its deployment."
    )
    wait_s: float = Field(
        default=600,
        ge=0,
        le=604_800,
        description="Seconds to wait for a worker of a class before the next class in "
        "`fall_back` is taken, or the run fails; 0 does not wait.",
    )
    fall_back: tuple[HardwareClass, ...] = Field(
        default=(),
        max_length=2,
        description="Classes to take instead, in this order, after the wait; none: the run fails. "
        "Training that falls back to `cpu` computes on the CPU.",
    )

    @model_validator(mode="after")
    def _each_class_once(self) -> Self:
        classes = (self.hardware_class, *self.fall_back)
        if len(set(classes)) < len(classes):
            raise ValueError(
                f"fall_back {list(self.fall_back)} names a class twice, or the wanted class "
                f"{self.hardware_class!r} itself; name each other class once"
            )
        return self


class RoutingConfig(BaseModel):
    """Where each stage of the loop runs."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    mode: Literal["auto", "in process", "deployments"] = Field(
        default="auto",
        description="`auto` sends stages to work pools where the loop itself was started by a "
        "deployment, and runs them in its own process otherwise.",
    )
    feature_refresh: StageRouting = StageRouting()
    training: StageRouting = StageRouting()
    conversion: StageRouting = StageRouting()
    promotion: StageRouting = StageRouting()
    drift_check: StageRouting = StageRouting()

    def of(self, stage: StageName) -> StageRouting:
        """The rule of one stage."""
        rule: StageRouting = getattr(self, stage.replace(" ", "_"))
        return rule
