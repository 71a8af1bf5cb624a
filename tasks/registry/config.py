"""What to register under which name, and what a candidate must show before it may serve."""

from typing import Literal, Self

from pydantic import AliasChoices, Field, PositiveFloat, PositiveInt, model_validator

from tasks.kernel.settings import USE_CASE_NAME
from tasks.kernel.values import Described


class RegistryConfig(Described):
    """Names in the model registry."""

    model_name: str = Field(default="model", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
    """Registered model that all versions belong to."""
    experiment: str = Field(default="training", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
    """Experiment that holds the runs; also a folder name."""
    adopts: str | None = Field(default=None, pattern=USE_CASE_NAME)
    """Use case that the model name belonged to so far, where this one takes its model over; else a
    name of another use case is refused."""


def named_after(use_case: str) -> dict[str, str]:
    """Names of a use case's model and experiment where it gives none."""
    return {"model_name": use_case, "experiment": use_case}


class ApprovalConfig(Described):
    """Whether a person must agree before a candidate becomes the champion."""

    # Not `required`: Prefect drops properties of that name from a deployment's schema.
    enabled: bool = False
    """Ask a person once all gates are open; the candidate waits for the answer."""
    timeout_h: PositiveFloat = Field(default=72.0, le=8760)
    """Hours after which no answer means no: the candidate is rejected."""


class PromotionConfig(Described):
    """The gates between a candidate and the alias `champion`; all numbers are of the test rows."""

    min_auc: float = Field(default=0.6, ge=0.5, le=1, description="Floor of the AUC.")
    max_plausible_auc: float = Field(default=0.95, ge=0.5, le=1)
    """An AUC above this is too good: a leak of the label is suspected."""
    min_r2: float = Field(default=0.1, le=1, description="Of a regression: floor of R2.")
    max_plausible_r2: float = Field(default=0.995, le=1)
    """Of a regression: an R2 above this is too good: a leak of the label is suspected."""
    min_skill: float = Field(default=0.0, le=1)
    """Of a regression with a baseline: the lower bound of the skill lies above this; 0 is what the
    baseline itself has."""
    max_slice_error_ratio: float = Field(default=1.5, gt=0, le=100)
    """Of a regression: ceiling of the RMSE on the worst slice, as a multiple of the baseline
    model's or baseline's there, whichever errs less."""
    max_bias: float = Field(default=0.1, ge=0, le=10)
    """Of a regression: ceiling of the mean error, either way,
    in standard deviations of the label."""
    baseline_model_margin: float = Field(
        default=0.005,
        ge=0,
        le=0.5,
        validation_alias=AliasChoices("baseline_model_margin", "yardstick_margin"),
        description="AUC (or R2) the candidate may lie below the baseline model.",
    )
    champion_margin: float = Field(default=0.005, ge=0, le=0.5)
    """Rule `not_worse`: AUC (or R2) by which the lower bound of candidate minus champion may lie
    below zero."""
    champion_rule: Literal["not_worse", "better"] = "not_worse"
    """`not_worse`: the 95 % interval of candidate minus champion lies above minus the margin
    (non-inferiority). `better`: it lies above zero; of a recalibrated champion, whose ranking is
    the same, that of the error lies below instead."""
    max_calibration_error: float = Field(default=0.05, ge=0, le=1)
    """Ceiling of the expected calibration error."""
    min_slice_auc: float = Field(default=0.55, ge=0, le=1)
    """Floor of the AUC on the worst slice."""
    required_hardware: tuple[str, ...] = ("cpu",)
    """Hardware classes that each need at least one kept variant."""
    max_age_days: PositiveInt | None = None
    """Days the test window's end may lie in the past; empty means no limit."""
    approval: ApprovalConfig = ApprovalConfig()
    """A person's consent, asked when all gates are open."""

    @model_validator(mode="after")
    def _leaves_room_between_floor_and_ceiling(self) -> Self:
        for floor, ceiling in (("min_auc", "max_plausible_auc"), ("min_r2", "max_plausible_r2")):
            low, high = getattr(self, floor), getattr(self, ceiling)
            if low >= high:
                raise ValueError(
                    f"{floor}={low} is not below {ceiling}={high}, so no candidate could pass; "
                    "lower the floor or raise the ceiling"
                )
        return self
