"""What counts as drift, as a fault of the data, and as a loss of performance."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title


class UnitChange(BaseModel):
    """A mistake of units: values arrive as `scale` times the value plus `offset`."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    name: str = Field(min_length=1, description="From which unit to which.")
    scale: float = Field(gt=0, description="Factor.")
    offset: float = Field(default=0.0, description="Added after the factor, in the new unit.")


COMMON_UNIT_CHANGES = (
    UnitChange(name="Fahrenheit to Celsius", scale=5 / 9, offset=-160 / 9),
    UnitChange(name="Celsius to Fahrenheit", scale=1.8, offset=32.0),
    UnitChange(name="Celsius to Kelvin", scale=1.0, offset=273.15),
    UnitChange(name="miles to kilometres", scale=1.609344),
    UnitChange(name="kilometres to miles", scale=1 / 1.609344),
    UnitChange(name="feet to metres", scale=0.3048),
    UnitChange(name="metres to feet", scale=1 / 0.3048),
    UnitChange(name="inches to millimetres", scale=25.4),
    UnitChange(name="millimetres to inches", scale=1 / 25.4),
    UnitChange(name="minutes or hours to the next smaller unit", scale=60.0),
    UnitChange(name="seconds or minutes to the next larger unit", scale=1 / 60),
    UnitChange(name="share to percent", scale=100.0),
    UnitChange(name="percent to share", scale=0.01),
    UnitChange(name="unit to thousandth", scale=1000.0),
    UnitChange(name="thousandth to unit", scale=0.001),
)


class DriftVolume(BaseModel):
    """How many new rows start a drift check, between those that a schedule starts."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    table: str = Field(
        min_length=1, description="Raw table whose rows are counted; one with a time column."
    )
    rows: int = Field(
        ge=1,
        le=10**12,
        description="Rows after the window of the newest verdict, their labels known by the "
        "clock, that start a check.",
    )


class ServedDrift(BaseModel):
    """Drift checks of what was served, as the prediction log kept it."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    min_rows: int = Field(
        default=1000,
        ge=1,
        le=10**9,
        description="Rows that the stable version has answered in the window; with fewer there is "
        "no verdict.",
    )
    volume_rows: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="Answered rows after the window of the newest verdict that start a check on a "
        "platform; none: schedules alone do.",
    )


class DriftConfig(BaseModel):
    """Limits of one drift check; logged whole with the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    volume: DriftVolume | None = Field(
        default=None,
        description="New rows that start a check on a platform; none: schedules alone do.",
    )
    served: ServedDrift = Field(
        default=ServedDrift(), description="Checks of the prediction log instead of the features."
    )

    # Drift
    min_effect: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="A feature has drifted where the lower bound of its effect (KS or total "
        "variation distance, 0 to 1) is above this: about the share of rows that moved.",
    )
    confidence: float = Field(
        default=0.95,
        ge=0.5,
        lt=1,
        description="Of all lower bounds together: more features make no more alarms.",
    )
    num_bins: int = Field(
        default=100, ge=10, le=1000, description="Quantile bins of the reference for effects."
    )
    psi_bins: int = Field(default=10, ge=2, le=100, description="Quantile bins of the PSI.")
    max_categories: int = Field(
        default=200, ge=2, le=5000, description="Most frequent categories that are told apart."
    )
    replicates: int = Field(
        default=500, ge=100, le=10_000, description="Bootstrap replicates of the bounds."
    )
    block_days: int = Field(
        default=7,
        ge=1,
        le=90,
        description="Days drawn together in the bootstrap: as long as days resemble each other.",
    )
    min_days: int = Field(
        default=7, ge=4, le=366, description="UTC days with rows that a window needs."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the bootstrap.")

    # Performance
    min_auc_drop: float = Field(
        default=0.02, ge=0, le=0.5, description="A smaller loss of AUC is no reason to retrain."
    )
    min_r2_drop: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Of a regression: a smaller loss of R2 is no reason to retrain.",
    )
    min_skill_drop: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Of a regression: loss of skill (over the baseline, on the same rows) from "
        "which the model has gone stale. A window that is harder for all costs R2, not skill.",
    )
    min_excess_rise: float = Field(
        default=0.02,
        ge=0,
        le=0.5,
        description="Rise of the Brier score beyond what the scores promise that is reason enough "
        "to retrain by itself.",
    )

    # Faults
    max_missing_rise: float = Field(
        default=0.2, gt=0, le=1, description="Rise of a missing rate that is a fault of the feed."
    )
    max_unseen_share: float = Field(
        default=0.1, gt=0, le=1, description="Share of rows in unseen categories that is a fault."
    )
    min_frozen_days: int = Field(
        default=3,
        ge=2,
        le=90,
        description="Days in a row at one value that are a fault, where the reference has no run "
        "half as long.",
    )
    unit_changes: tuple[UnitChange, ...] = Field(
        default=COMMON_UNIT_CHANGES, description="Mistakes of units that are looked for."
    )

    @model_validator(mode="after")
    def _bins_nest(self) -> Self:
        if self.num_bins % self.psi_bins:
            raise ValueError(
                f"num_bins={self.num_bins} is no multiple of psi_bins={self.psi_bins}; use one, so "
                "that the bins of the PSI are made of whole fine bins"
            )
        return self
