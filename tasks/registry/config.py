"""What to register under which name, and what a candidate must show before it may serve."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class RegistryConfig(BaseModel):
    """Names in the model registry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_name: str = Field(
        default="model",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$",
        description="Registered model that all versions belong to.",
    )
    experiment: str = Field(
        default="training",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$",
        description="Experiment that holds the runs; also a folder name.",
    )


class PromotionConfig(BaseModel):
    """The gates between a candidate and the alias `champion`; all numbers are of the test rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_auc: float = Field(default=0.6, ge=0.5, le=1, description="Floor of the AUC.")
    max_plausible_auc: float = Field(
        default=0.95,
        ge=0.5,
        le=1,
        description="An AUC above this is too good: a leak of the label is suspected.",
    )
    yardstick_margin: float = Field(
        default=0.005, ge=0, le=0.5, description="AUC the candidate may lie below the yardstick."
    )
    champion_margin: float = Field(
        default=0.005,
        ge=0,
        le=0.5,
        description="Rule `not_worse`: AUC by which the lower bound of candidate minus champion "
        "may lie below zero.",
    )
    champion_rule: Literal["not_worse", "better"] = Field(
        default="not_worse",
        description="`not_worse`: the 95 % interval of candidate minus champion lies above minus "
        "the margin (non-inferiority). `better`: it lies above zero.",
    )
    max_calibration_error: float = Field(
        default=0.05, ge=0, le=1, description="Ceiling of the expected calibration error."
    )
    min_slice_auc: float = Field(
        default=0.55, ge=0, le=1, description="Floor of the AUC on the worst slice."
    )
    required_hardware: tuple[str, ...] = Field(
        default=("cpu",),
        description="Hardware classes that each need at least one kept variant.",
    )
    max_age_days: PositiveInt | None = Field(
        default=None,
        description="Days the test window's end may lie in the past; empty means no limit.",
    )

    @model_validator(mode="after")
    def _leaves_room_between_floor_and_ceiling(self) -> Self:
        if self.min_auc >= self.max_plausible_auc:
            raise ValueError(
                f"min_auc={self.min_auc} is not below max_plausible_auc={self.max_plausible_auc}, "
                "so no candidate could pass; lower the floor or raise the ceiling"
            )
        return self
