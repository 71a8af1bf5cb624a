"""Where the stages of a loop are to run: hardware classes, fall-backs, and a second pool."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title

HardwareClass = Literal["cpu", "gpu"]
StageName = Literal["feature refresh", "training", "conversion", "promotion", "drift check"]
SHORT_NAME = r"^[a-z][a-z0-9-]*$"


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


class BurstPool(BaseModel):
    """A second work pool, which costs money or stands elsewhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    name: str = Field(
        pattern=SHORT_NAME,
        max_length=60,
        description="Name in its deployments, such as `cloud-gpu` in `training/cloud-gpu`.",
    )
    hardware_class: HardwareClass = Field(description="Class that its workers have.")
    region: str = Field(
        pattern=SHORT_NAME, max_length=60, description="Where its machines are, such as `eu-west`."
    )
    cost_per_hour: float = Field(ge=0, description="Price of one run for an hour, in any currency.")


class BurstConfig(BaseModel):
    """When runs go to a second pool, and to which they may go."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    max_waiting_runs: int = Field(
        default=3, ge=0, description="Waiting runs of the own pool beyond which another is asked."
    )
    pools: tuple[BurstPool, ...] = Field(
        default=(), max_length=20, description="Second pools, the first that passes is taken."
    )
    data_regions: tuple[str, ...] = Field(
        default=(), description="Regions that the data may be sent to; none: it may leave for none."
    )
    max_cost_per_hour: float = Field(
        default=0, ge=0, description="Highest price for an hour, in the currency of the pools."
    )

    @model_validator(mode="after")
    def _each_pool_once(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names) or {"cpu", "gpu"} & set(names):
            raise ValueError(
                f"burst pools {names} bear a name twice, or that of an own pool (cpu, gpu); give "
                "each a name of its own"
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
    burst: BurstConfig = BurstConfig()

    def of(self, stage: StageName) -> StageRouting:
        """The rule of one stage."""
        rules: dict[StageName, StageRouting] = {
            "feature refresh": self.feature_refresh,
            "training": self.training,
            "conversion": self.conversion,
            "promotion": self.promotion,
            "drift check": self.drift_check,
        }
        return rules[stage]
