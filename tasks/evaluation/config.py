"""How models are judged and mapped anew, what counts as drift, what features are compared with."""

from datetime import timedelta

from pydantic import Field, PositiveInt

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DataSplits
from tasks.kernel.errors import WindowError
from tasks.kernel.values import Described

MONTH = "month"


class EvaluationConfig(Described):
    """Slices of one judgement, and the fewest rows that are judged."""

    slices: tuple[str, ...] = Field(default=(MONTH,), max_length=20)
    """Columns by whose values quality is also shown; `month` is the calendar month of the event
    time in UTC."""
    min_slice_rows: int = Field(default=500, ge=2, le=1_000_000)
    """A slice with fewer rows is not judged."""
    min_slice_positives: int = Field(default=50, ge=1, le=1_000_000)
    """A slice with fewer rows of either label is not judged."""
    min_days: int = Field(default=7, ge=2, le=366)
    """Fewer UTC days give no interval: rows of one day resemble each other."""


class BaselineModelConfig(Described):
    """Gradient boosting with ordinary settings: good without a search, cheap, reproducible."""

    max_iterations: int = Field(default=300, ge=1, le=5000)
    """Trees at most; the validation window picks."""
    min_leaf_rows: int = Field(default=100, ge=1, le=100_000)
    """Rows of a leaf, at least."""


class MonitoringConfig(Described):
    """What features are compared with over time."""

    baseline: TimeWindow | None = None
    """Clean window to compare with; none: statistics are kept, nothing is judged."""
    window_days: PositiveInt = Field(default=7, ge=7)
    """Days that drift is measured over; single days give large PSI without a fault."""


class DriftVolume(Described):
    """How many new rows start a drift check, between those that a schedule starts."""

    table: str = Field(min_length=1)
    """Raw table whose rows are counted; one with a time column."""
    rows: int = Field(ge=1, le=10**12)
    """Rows after the window of the newest drift result, their labels known by the clock, that start
    a check."""


class ServedDrift(Described):
    """Drift checks of what was served, as the prediction log kept it."""

    min_rows: int = Field(default=1000, ge=1, le=10**9)
    """Rows that the stable version has answered in the window; with fewer there is no result."""
    volume_rows: int | None = Field(default=None, ge=1, le=10**12)
    """Answered rows after the newest drift result's window that start a check on a platform; none:
    schedules alone do."""


class DriftConfig(Described):
    """Limits of one drift check; logged whole with the run."""

    volume: DriftVolume | None = None
    """New rows that start a check on a platform; none: schedules alone do."""
    served: ServedDrift = ServedDrift()
    """Checks of the prediction log instead of the features."""

    # Drift
    min_effect: float = Field(default=0.1, gt=0, lt=1)
    """A feature has drifted where the lower bound of its effect (KS or total variation distance, 0
    to 1) is above this: about the share of rows that moved."""
    min_days: int = Field(default=7, ge=4, le=366)
    """UTC days with rows that a window needs."""

    # Performance
    min_auc_drop: float = Field(default=0.02, ge=0, le=0.5)
    """A smaller loss of AUC is no reason to retrain."""
    min_r2_drop: float = Field(default=0.02, ge=0, le=1)
    """Of a regression: a smaller loss of R2 is no reason to retrain."""
    min_skill_drop: float = Field(default=0.05, ge=0, le=1)
    """Of a regression: loss of skill (over the baseline, on the same rows) from which the model has
    gone stale, if R2 fell too. A harder window costs R2, not skill."""

    # A change that is too slow or too small for one window
    slow_change_days: int = Field(default=120, ge=30, le=36_500)
    """Days after which the sequential test of the days since the reference raises a false alarm at
    the earliest, on average; 120 was one a year on permuted days."""


class RecalibrationConfig(Described):
    """Bounds of a recalibration; the window itself is that of the drift check."""

    holdout_days: int = Field(default=14, ge=2, le=366)
    """Days at the end of the window that judge the new map; it
    is fitted to the days before them."""
    min_rows: int = Field(default=500, ge=50, le=10_000_000)
    """With fewer labelled rows to fit to, the scores are left as they are."""
    min_positives: int = Field(default=50, ge=5, le=10_000_000)
    """Of a classification: the same, with fewer rows of either label."""


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
