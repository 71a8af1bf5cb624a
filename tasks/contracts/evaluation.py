"""Values about how good a model is, alone and beside the champion.

Values about a map of a model's scores that was fitted anew, the network left as it was.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, ConfigDict, Field, NonNegativeInt, PositiveInt

from tasks.contracts.base import RESULT, Artifact, Contract, ModelVersionRef, TimeWindow
from tasks.contracts.data import AUC_NAME, R2_NAME, DataSplits
from tasks.kernel.values import Described


class Metric(Contract):
    """A number with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """All three numbers in one format, such as `0.751 [0.733, 0.769]` for `.3f`."""
        value, low, high = (format(number, spec) for number in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"


class MetricSet(Described):
    """Quality of one set of scores on one set of rows, of a classification.

    Of several classes: `auc`, `pr_auc` and `calibration_error` are means over the classes, each
    against the rest; `brier` is their sum, and `log_loss` that of the true class.
    """

    primary_name: ClassVar[str] = AUC_NAME

    num_rows: PositiveInt
    base_rate: float = Field(description="Of label 1, or of the most frequent of several classes.")
    auc: Metric
    pr_auc: Metric
    brier: Metric
    log_loss: Metric
    calibration_error: Metric
    by_class: dict[str, MetricSet] = Field(default={})
    """Each of several classes against the rest, on all rows."""

    @property
    def primary(self) -> Metric:
        """What models are compared by; more is better."""
        return self.auc


class RegressionMetrics(Described):
    """Quality of one set of predictions on one set of rows; errors in the label's unit."""

    primary_name: ClassVar[str] = R2_NAME

    num_rows: PositiveInt
    unit: str
    label_mean: float
    label_deviation: float = Field(description="Standard deviation of the labels.")
    r2: Metric = Field(description="Share of the labels' variance that is explained; 1 is all.")
    rmse: Metric = Field(description="Root of the mean squared error.")
    mae: Metric = Field(description="Mean absolute error.")
    bias: Metric = Field(description="Mean of prediction minus label.")
    skill: Metric | None
    """1 minus the mean squared error over that of the baseline, on the rows where it is known;
    above 0 is better than the baseline. None without a baseline."""

    @property
    def primary(self) -> Metric:
        """What models are compared by; more is better."""
        return self.r2


Quality = MetricSet | RegressionMetrics


class SliceMetrics(Described):
    """Quality on the rows where `column` equals `value`."""

    column: str
    value: str
    metrics: Quality
    error_ratio: Metric | None = None
    """Of a regression: RMSE over that of the plain prediction which errs least on these rows, the
    baseline model or the baseline where it is known. A plain prediction that errs by less than a
    tolerance counts as erring by that."""


class PairedComparison(Described):
    """Candidate minus another model on the same rows, same bootstrap replicates."""

    error_name: ClassVar[str] = "Brier score"

    against: str = Field(description="`champion:<version>` or `yardstick`, the baseline model.")
    auc_difference: Metric
    brier_difference: Metric
    log_loss_difference: Metric | None = None
    """Null in records before 2026-11-21, as the next one."""
    calibration_error_difference: Metric | None = None

    @property
    def primary(self) -> Metric:
        """Above 0 the candidate is better."""
        return self.auc_difference

    @property
    def error(self) -> Metric:
        """Below 0 the candidate errs less."""
        return self.brier_difference


class RegressionComparison(Contract):
    """As `PairedComparison`, of a regression."""

    error_name: ClassVar[str] = "RMSE"

    against: str = Field(description="`champion:<version>` or `yardstick`, the baseline model.")
    r2_difference: Metric
    rmse_difference: Metric

    @property
    def primary(self) -> Metric:
        """Above 0 the candidate is better."""
        return self.r2_difference

    @property
    def error(self) -> Metric:
        """Below 0 the candidate errs less."""
        return self.rmse_difference


Comparison = PairedComparison | RegressionComparison


class ValueBand(Contract):
    """Labels of the rows whose predictions are about `x`."""

    x: float = Field(description="Mean prediction.")
    low: float = Field(description="10th percentile of the labels.")
    mean: float
    high: float = Field(description="90th percentile.")
    num_rows: PositiveInt


class CurvePoint(Contract):
    """One point of a curve that the report draws."""

    x: float
    y: float
    weight: float = 0.0


class BaselineModel(Described):
    """Scores of a well-known kind of model on the test rows: what the data gives without effort."""

    name: str = Field(description="The kind of model, its library and its size.")
    snapshot_sha256: str
    splits: DataSplits
    scores: Artifact
    """Parquet, in the order of the snapshot: row id, yardstick_score."""


class SingleFeature(Described):
    """What one input tells about the label all by itself."""

    name: str
    score: float = Field(description="AUC, or R2 of a regression, on the test rows.")
    earlier_score: float | None
    """The same of its entity's value one row earlier; None where not known."""
    trusted: bool = Field(default=False, description="Somebody looked at it: it is known in time.")


class FeatureRanking(Contract):
    """The inputs that tell most about the label by themselves, best first."""

    features: tuple[SingleFeature, ...]


class StudentReport(Described):
    """A smaller network beside the one it came from, on the same rows and bootstrap draws."""

    window: TimeWindow
    parent: Quality
    student: Quality = Field(description="Of the network that is offered.")
    to_parent: Comparison = Field(description="Student minus parent.")
    distilled: Quality | None = None
    """Of the network that learnt from the parent too, if one did."""
    control: Quality | None = None
    """Of the control run: same start, rows, epochs and seed, labels alone."""
    gain: Comparison | None = Field(default=None, description="Distilled minus control.")
    result: str | None = Field(default=None, validation_alias=RESULT)
    """Whether the teacher helped, in words; None where there was none."""
    refusal: str | None
    """Why the student is not good enough to be registered; None where it is."""


class ScoredWindow(Described):
    """Scores of one model on all rows of one window, and their quality where labels exist."""

    program_sha256: str
    snapshot_sha256: str
    window: TimeWindow
    num_rows: PositiveInt
    scores: Artifact
    """Parquet, in the order of the snapshot: row id, event time, label, score."""
    metrics: Quality | None = Field(description="Of the labelled rows; None where too few.")
    excess_brier: Metric | None
    """Brier score minus what the scores themselves promise, the mean of p (1 - p): above 0 the
    model errs more than it says, below 0 less."""
    unjudged: str | None = Field(default=None, description="Why there are no metrics.")


class EvaluationReport(Described):
    """Judgement of one trained model on the test window; the aliases are names of before."""

    model_config = ConfigDict(serialize_by_alias=True)

    model_sha256: str = Field(description="Digest of the judged program.")
    snapshot_sha256: str
    window: TimeWindow
    overall: Quality
    slices: tuple[SliceMetrics, ...]
    skipped_slices: tuple[str, ...] = Field(description="Slices too small to judge, with counts.")
    baseline_model: Quality = Field(
        validation_alias=AliasChoices("yardstick", "baseline_model"),
        serialization_alias="yardstick",
    )
    baseline_model_name: str = Field(
        validation_alias=AliasChoices("yardstick_name", "baseline_model_name"),
        serialization_alias="yardstick_name",
    )
    baseline: RegressionMetrics | None = None
    """Of the baseline as a model, on the rows where it is known."""
    baseline_name: str | None = Field(default=None, description="Its column.")
    comparisons: tuple[Comparison, ...]
    predictions: Artifact
    """Parquet: row id, event time, label, score, yardstick_score, champion_score."""
    roc: tuple[CurvePoint, ...] = Field(description="None of a regression, as the next two.")
    precision_recall: tuple[CurvePoint, ...]
    calibration: tuple[CurvePoint, ...] = Field(description="x mean score, y rate, weight rows.")
    observed: tuple[ValueBand, ...] = ()
    """Labels by prediction, lowest first; of a regression."""
    leading: tuple[SingleFeature, ...] = ()
    """Inputs that tell most by themselves; none in earlier releases."""
    residuals: tuple[CurvePoint, ...] = ()
    """x middle of a class of errors (prediction minus label), y its width, weight rows; of a
    regression. The outermost classes hold all beyond."""


class Calibrator(Described):
    """A rising straight line: of a classification over the logit, of a regression over the score.

    A rising map keeps the order of all scores.
    """

    slope: float = Field(gt=0, allow_inf_nan=False, description="Above 0: the order stays.")
    intercept: float = Field(allow_inf_nan=False)
    """In logits, or in the unit of the label."""

    def after(self, earlier: Calibrator) -> Calibrator:
        """The one map that equals `earlier` and then this one."""
        return Calibrator(
            slope=self.slope * earlier.slope,
            intercept=self.slope * earlier.intercept + self.intercept,
        )


class MapFit(Described):
    """A map and the rows that it was fitted to."""

    map: Calibrator
    slope_error: float = Field(ge=0)
    """Standard error; rows of one day count as one observation."""
    intercept_error: float = Field(ge=0, description="The same, of the intercept.")
    window: TimeWindow
    num_rows: PositiveInt = Field(description="Labelled rows.")
    num_positives: NonNegativeInt | None = None
    """Rows with label 1, of a classification."""


class FitOutcome(Contract):
    """A fitted map, or why there is none."""

    fit: MapFit | None
    refusal: str | None = Field(default=None, description="A sentence; None where there is a map.")


class Calibration(Described):
    """How a version's scores came from those of another one."""

    source: ModelVersionRef = Field(description="Version whose program was mapped.")
    fit: MapFit = Field(description="The map from the source's scores to this version's.")
    whole_map: Calibrator
    """From the network's own output to this version's: earlier maps, and of a regression the
    label's scale, are in it."""
