"""How freely the controller may act: cool-down, budget, and what it takes to roll back."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import field_title


class RetrainingPolicy(BaseModel):
    """Bounds of the controller for one use case; kept with every result that it judges."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    cool_down_hours: float = Field(
        default=6.0,
        ge=0,
        le=24 * 90,
        description="Hours after a retraining was claimed in which none of the same model is; no "
        "recalibration is either, nor in those after another recalibration.",
    )
    max_runs_per_week: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="Retrainings of one model in any seven days; 0 means it is never retrained.",
    )
    max_recalibrations_per_week: int = Field(
        default=7,
        ge=0,
        le=1000,
        description="Recalibrations of one model in any seven days, which train nothing and so "
        "have a budget of their own; 0 means that the model is retrained instead.",
    )
    max_run_hours_per_week: float | None = Field(
        default=None,
        gt=0,
        le=24 * 7 * 100,
        description="Hours that retrainings and recalibrations of one model may take in any seven "
        "days, as far as they are known; empty means no limit.",
    )
    roll_back_within_days: float = Field(
        default=14.0,
        ge=0,
        le=365,
        description="Days after a promotion in which it may be taken back; 0 means never.",
    )
    max_auc_loss: float = Field(
        default=0.04,
        ge=0,
        le=0.5,
        description="The ranking is intact where the AUC has for certain not lost more than this; "
        "then wrong scores ask for a new calibration only.",
    )
