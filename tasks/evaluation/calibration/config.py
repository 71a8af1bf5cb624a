"""Which rows a new map of the scores is fitted to, and which judge it."""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import TimeWindow, field_title
from tasks.contracts.data import DataSplits
from tasks.kernel.errors import WindowError


class RecalibrationConfig(BaseModel):
    """Bounds of a recalibration; the window itself is that of the drift check."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    holdout_days: int = Field(
        default=14,
        ge=2,
        le=366,
        description="Days at the end of the window that judge the new map; it is fitted to the "
        "days before them.",
    )
    min_rows: int = Field(
        default=500,
        ge=50,
        le=10_000_000,
        description="With fewer labelled rows to fit to, the scores are left as they are.",
    )
    min_positives: int = Field(
        default=50,
        ge=5,
        le=10_000_000,
        description="Of a classification: the same, with fewer rows of either label.",
    )


def split_window(window: TimeWindow, config: RecalibrationConfig) -> tuple[TimeWindow, TimeWindow]:
    """The part of the window to fit to, and the later part that judges.

    Raises:
        WindowError: the window is no longer than what judges.
    """
    holdout = timedelta(days=config.holdout_days)
    if window.end - window.start <= holdout:
        raise WindowError(
            f"window {window} has no day before the {config.holdout_days} that judge a new map of "
            "the scores (`recalibration.holdout_days`); give a longer window. Nothing was fitted"
        )
    begin = window.end - holdout
    return TimeWindow(start=window.start, end=begin), TimeWindow(start=begin, end=window.end)


def calibration_splits(train: TimeWindow, fit: TimeWindow, holdout: TimeWindow) -> DataSplits:
    """The splits of the recalibrated model: its network's training rows, and the two parts.

    Raises:
        WindowError: the map would be fitted to rows that the network was trained on, whose scores
            are better than those of any later row.
    """
    if fit.start < train.end:
        raise WindowError(
            f"the network was trained on rows up to {train.end:%Y-%m-%dT%H:%MZ}, the new map is to "
            f"be fitted to {fit}; expected rows later than those of the training. Nothing was "
            "fitted; take a later window, or retrain"
        )
    return DataSplits(train=train, validation=fit, test=holdout)
