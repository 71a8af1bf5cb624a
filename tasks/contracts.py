"""Frozen values that travel between rooms: small, JSON-serializable, naming data by URI and digest.

Only values live here. Data itself stays in the artifact store (`tasks.settings.ArtifactStore`).
"""

from __future__ import annotations

import zlib
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from tasks.errors import DataContractError, WindowError

if TYPE_CHECKING:
    import pandas as pd


def field_title(name: str, _: object) -> str:
    """Label of a field in a form: its name in words.

    Without it, a field that holds a model is labelled with that model's class, so that three
    windows would all be called `TimeWindow`.
    """
    return name.replace("_", " ").capitalize()


class Contract(BaseModel):
    """Base of every value that travels: frozen, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)


class Artifact(Contract):
    """One file or folder in the artifact store."""

    uri: str = Field(description="`artifact:<kind>/<key>/<path>`, relative to the store's root.")
    sha256: str = Field(min_length=64, max_length=64, description="Digest of the content.")
    num_bytes: NonNegativeInt


class TimeWindow(Contract):
    """Half-open window [start, end) in UTC."""

    start: datetime = Field(description="First moment inside the window, with a time zone.")
    end: datetime = Field(description="First moment after the window, with a time zone.")

    @model_validator(mode="after")
    def _is_a_window(self) -> Self:
        for name, moment in (("start", self.start), ("end", self.end)):
            if moment.tzinfo is None:
                raise ValueError(
                    f"window {name} {moment.isoformat()} has no time zone; write it in UTC, for "
                    f"example {moment.isoformat()}+00:00"
                )
        if self.end <= self.start:
            kind = "empty" if self.end == self.start else "reversed"
            raise ValueError(
                f"window [{self.start.isoformat()}, {self.end.isoformat()}) is {kind}; expected "
                "start before end. Nothing was touched"
            )
        object.__setattr__(self, "start", self.start.astimezone(UTC))
        object.__setattr__(self, "end", self.end.astimezone(UTC))
        return self

    def check_not_in_future(self, now: datetime) -> None:
        """Refuse a window that ends after `now`: its data cannot be complete.

        Raises:
            WindowError: the window ends in the future.
        """
        if self.end > now:
            raise WindowError(
                f"window {self} ends in the future (now is {now:%Y-%m-%dT%H:%MZ}); expected an end "
                "at or before now, because later rows do not exist yet. Nothing was touched"
            )

    def contains(self, other: TimeWindow) -> bool:
        """True where `other` lies wholly inside this window."""
        return self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        return f"{self.start:%Y-%m-%dT%H:%MZ} to {self.end:%Y-%m-%dT%H:%MZ}"

    @property
    def slug(self) -> str:
        """Short form for names, such as `20130101-20140101`."""
        return f"{self.start:%Y%m%d}-{self.end:%Y%m%d}"


class DataSplits(Contract):
    """Train, validation and test windows, one after the other in time."""

    train: TimeWindow = Field(description="Rows that the model learns from.")
    validation: TimeWindow = Field(description="Rows that choose the epoch; later than training.")
    test: TimeWindow = Field(description="Rows that judge the model; later than all it has seen.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.train.end > self.validation.start or self.validation.end > self.test.start:
            raise ValueError(
                f"splits overlap or run backwards: train {self.train}, validation "
                f"{self.validation}, test {self.test}; expected each to start at or after the end "
                "of the one before, or the future leaks into the past"
            )
        return self


AUC_NAME, R2_NAME = "AUC", "R²"
TaskKind = Literal["classification", "regression"]
"""What a model is asked for: the probability of a label that is 0 or 1, or a number itself."""

CATEGORY_CODE_MASK = 0x7FFFFFFF


def category_code(value: str | None) -> int:
    """Integer that stands for a category in every exported model: CRC-32 of its UTF-8, 31 bits.

    Any language can compute it, it needs no vocabulary file, and missing (null or empty) is 0. The
    model itself maps codes to its own vocabulary; a code it has never seen means "unknown".
    """
    return zlib.crc32(value.encode()) & CATEGORY_CODE_MASK if value else 0


class DatasetSchema(Contract):
    """Which column of a snapshot is what; the raw input of every exported model format."""

    row_id: str = Field(description="Unique id of a row.")
    event_time: str = Field(description="Prediction moment, UTC.")
    label: str = Field(description="0 or 1; for a regression a number.")
    categorical: tuple[str, ...] = Field(description="String columns, in model input order.")
    numeric: tuple[str, ...] = Field(description="Number columns, in model input order.")
    task: TaskKind = "classification"
    unit: str = Field(default="", description="Of a label that is a number.")
    baseline: str | None = Field(
        default=None,
        description="Number column that is itself the plainest prediction of the label, such as "
        "its last known value; of a regression only.",
    )

    def model_inputs(self, frame: pd.DataFrame) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The two input arrays of every exported model, for the rows of `frame`, in their order.

        Returns:
            `categorical`: int32, shape (rows, categories), `category_code` of each string.
            `numeric`: float32, shape (rows, numbers); a missing number is NaN.

        Raises:
            DataContractError: a column is absent.
        """
        missing = [c for c in (*self.categorical, *self.numeric) if c not in frame.columns]
        if missing:
            raise DataContractError(
                f"the data lacks column(s) {', '.join(missing)} that the model takes; it has "
                f"{len(frame.columns)} columns. Build the data with the model's feature service"
            )
        codes = np.empty((len(frame), len(self.categorical)), dtype=np.int32)
        for position, name in enumerate(self.categorical):
            values = frame[name].astype("category")
            table = np.array([category_code(str(v)) for v in values.cat.categories] + [0])
            codes[:, position] = table[values.cat.codes.to_numpy()]  # null has code -1: the last
        numbers = np.empty((len(frame), len(self.numeric)), dtype=np.float32)
        for position, name in enumerate(self.numeric):
            numbers[:, position] = frame[name].to_numpy(dtype=np.float32, na_value=np.nan)
        return codes, numbers


class SourceFile(Contract):
    """The file outside from which a raw table was read."""

    uri: str = Field(description="As the feature repository names it.")
    sha256: str = Field(min_length=64, max_length=64)
    num_bytes: NonNegativeInt


class TableRef(Contract):
    """One table written for a window."""

    name: str
    artifact: Artifact
    num_rows: NonNegativeInt
    source: SourceFile | None = Field(default=None, description="Of a landed table only.")


class LandedRows(Contract):
    """Raw rows of one window, copied as they came into typed Parquet, not yet trusted."""

    window: TimeWindow
    tables: tuple[TableRef, ...]


class ValidationResult(Contract):
    """Outcome of one expectation suite on one table; the full result is kept."""

    suite: str
    subject: str = Field(description="Name of the table or snapshot that was checked.")
    subject_sha256: str = Field(description="Digest of what was checked.")
    num_rows: NonNegativeInt
    num_expectations: PositiveInt
    result: Artifact = Field(description="The full validation result, JSON.")
    warnings: tuple[str, ...] = Field(
        default=(), description="Sentence of every expectation that was only warned about."
    )


class ValidatedRows(Contract):
    """Landed rows with the validation results that vouch for them."""

    landed: LandedRows
    validations: tuple[ValidationResult, ...]


class FeatureTables(Contract):
    """One version of all raw and feature tables; versions are immutable."""

    version: str = Field(description="Digest of the rows of all tables.")
    raw: tuple[TableRef, ...]
    tables: tuple[TableRef, ...]
    sources: dict[str, str] = Field(
        description="Each window that went in (`start/end`), and the digest of its rows and rules."
    )
    follows: dict[str, str] = Field(
        default={}, description="Raw table to its digest in the version that this one continues."
    )


class MaterializedView(Contract):
    """What one feature view holds online after materialization."""

    name: str
    watermark: datetime = Field(description="Everything before this moment has been written.")
    num_entities: NonNegativeInt
    num_written: NonNegativeInt = Field(
        default=0, description="Entities that got new values in the latest write."
    )
    num_kept: NonNegativeInt = Field(
        default=0, description="Entities that kept values as new or newer in the latest write."
    )
    num_converted_by_feast: NonNegativeInt = Field(
        default=0, description="Values that took Feast's slower way, cell by cell."
    )
    version: NonNegativeInt | None = Field(default=None, description="Feast's number of the view.")
    definition: str | None = Field(default=None, description="Digest of the view's definition.")
    table: str | None = Field(default=None, description="Feature table that the view reads.")


class MonitoredPeriod(Contract):
    """Some days of one view, or of one of its features, as one point of a picture."""

    start: datetime
    low: float | None = Field(default=None, description="5th percentile, mean over the days.")
    median: float | None = None
    high: float | None = Field(default=None, description="95th percentile, mean over the days.")
    null_rate: float
    num_rows: NonNegativeInt


class MonitoredFeature(Contract):
    """Values of one feature over time; the features that moved most come first."""

    view: str
    feature: str
    psi: float | None = Field(description="Of the newest window; None where it was not measured.")
    ks: float | None = None
    drifted: bool
    periods: tuple[MonitoredPeriod, ...]


class MonitoredView(Contract):
    """Volume, freshness and nulls of one feature view in the window."""

    view: str
    num_rows: NonNegativeInt
    num_features: NonNegativeInt
    age_hours: float | None = Field(description="Age of the newest row at the window's end.")
    lag_minutes: float | None = Field(description="Median time from event to store.")
    null_rate: float = Field(description="Mean over features and days.")
    highest_psi: float | None = Field(description="Of its features in the newest window.")
    psi_bound: float | None = Field(description="PSI from which a feature has drifted.")
    num_alerts: NonNegativeInt
    periods: tuple[MonitoredPeriod, ...] = Field(description="Nulls and rows of the view.")
    ages_hours: tuple[float | None, ...] = Field(description="Highest age in each period.")


class FeatureMonitoring(Contract):
    """What the monitoring of features saw in one window."""

    window: TimeWindow
    baseline: TimeWindow | None = Field(description="None where nothing was judged.")
    tables_version: str
    num_statistics: NonNegativeInt = Field(description="Statistics kept of this window.")
    views: tuple[MonitoredView, ...]
    features: tuple[MonitoredFeature, ...]
    alerts: tuple[str, ...] = Field(description="Sentence of every alert of the window.")
    num_new_alerts: NonNegativeInt = Field(description="Those that nobody was told before.")
    stale: tuple[str, ...] = Field(
        default=(), description="Those alerts that say that a view's newest row is too old."
    )

    @property
    def newly_stale(self) -> tuple[str, ...]:
        """What is to be told of stale views; nothing where nothing is new."""
        return self.stale if self.num_new_alerts else ()


class FeatureRefresh(Contract):
    """Result of `feature_refresh`: feature tables validated, published and materialized."""

    window: TimeWindow
    rows: ValidatedRows
    tables: FeatureTables
    validations: tuple[ValidationResult, ...]
    views: tuple[MaterializedView, ...]
    monitoring: FeatureMonitoring | None = Field(
        default=None, description="None in results of releases that did not monitor."
    )


class ExcludedRows(Contract):
    """Rows of the entity frame that carry no label, counted by reason: none vanish silently."""

    reason: str
    num_rows: NonNegativeInt


class ViewPin(Contract):
    """The version of a feature view that a snapshot read, and how far its values reached."""

    version: NonNegativeInt = Field(description="Feast's number: `<view>@v<version>:<feature>`.")
    definition: str = Field(description="Digest of the definition.")
    table: str = Field(description="Feature table that the view reads.")
    last_event: datetime | None = Field(description="Latest event time in the table, UTC.")
    last_created: datetime | None = Field(description="Latest moment of arrival in the table, UTC.")


class TablePin(Contract):
    """One table as a snapshot read it, wherever in the artifact store its files are kept."""

    name: str
    group: Literal["raw", "features"]
    sha256: str
    num_rows: NonNegativeInt


class SnapshotPins(Contract):
    """Everything that a snapshot was made from, exactly enough to make it again."""

    service_version: PositiveInt
    service_definition: str = Field(description="Digest of the service's content, views included.")
    registry: str = Field(description="Digest of all definitions in Feast's registry.")
    views: dict[str, ViewPin]
    tables: tuple[TablePin, ...]
    entity_sql: str = Field(description="Digest of the query that says whom to predict for.")
    retrieval_sql: str = Field(description="Digest of the point-in-time join.")
    software: dict[str, str] = Field(description="Versions of what wrote the file.")
    evidence: Artifact = Field(
        description="Folder beside the data: the SQL texts and the definitions themselves."
    )


class NumberSummary(Contract):
    """What some numbers are like."""

    mean: float
    deviation: NonNegativeFloat = Field(description="Standard deviation.")
    low: float
    high: float


class FeatureSnapshot(Contract):
    """A point-in-time training set: one Parquet file, rows in order of event time and row id."""

    data: Artifact
    num_rows: PositiveInt
    window: TimeWindow
    columns: DatasetSchema
    feature_service: str
    feature_views: dict[str, str] = Field(description="Feature view name to definition digest.")
    tables_version: str = Field(description="`FeatureTables.version` that was read.")
    label_definition: str = Field(description="What a label of 1 means, or the number, in words.")
    positive_rate: float | None = Field(ge=0, le=1, description="None where the label is a number.")
    label_summary: NumberSummary | None = Field(
        default=None, description="Of a label that is a number."
    )
    excluded: tuple[ExcludedRows, ...]
    pins: SnapshotPins | None = Field(
        default=None, description="None in a snapshot of an earlier release."
    )


class ValidatedDataset(Contract):
    """A snapshot and the validation result that vouches for it; training takes nothing else."""

    snapshot: FeatureSnapshot
    validation: ValidationResult

    @model_validator(mode="after")
    def _result_is_of_this_snapshot(self) -> Self:
        if self.validation.subject_sha256 != self.snapshot.data.sha256:
            raise ValueError(
                f"validation result is of {self.validation.subject_sha256[:12]}, the snapshot is "
                f"{self.snapshot.data.sha256[:12]}; validate this snapshot before using it"
            )
        return self


class EpochMetrics(Contract):
    """One epoch of training; losses are means over the rows of all ranks.

    Of a classification binary cross-entropy in nats, of a regression the Huber loss of the
    standardised label.
    """

    epoch: NonNegativeInt
    train_loss: float
    validation_loss: float
    validation_auc: float | None = Field(default=None, description="Of a classification.")
    validation_r2: float | None = Field(
        default=None, description="Of a regression: share of the label's variance explained."
    )
    learning_rate: float
    seconds: float
    rows_per_s: float

    @property
    def quality(self) -> float:
        """What epochs and trials are compared by; more is better. NaN where it is not known."""
        known = self.validation_auc if self.validation_r2 is None else self.validation_r2
        return float("nan") if known is None else known

    @property
    def quality_name(self) -> str:
        """Its name, for people."""
        return AUC_NAME if self.validation_r2 is None else R2_NAME


class PhaseTime(Contract):
    """What one rank spent in one phase; quantiles are over steps, after the first few."""

    seconds: NonNegativeFloat
    cpu_s: NonNegativeFloat = Field(
        description="CPU seconds of the thread that runs the loop: fewer where it waited."
    )
    steady_s: NonNegativeFloat = Field(
        description="Without the first steps, which build what later ones reuse."
    )
    steady_cpu_s: NonNegativeFloat
    p50_s: NonNegativeFloat | None = None
    p95_s: NonNegativeFloat | None = None


class RankTelemetry(Contract):
    """What one rank of a training run did and took."""

    rank: NonNegativeInt
    host: str
    num_steps: NonNegativeInt
    num_rows: NonNegativeInt
    rows_per_s: NonNegativeFloat | None = Field(
        description="While training: without validation, checkpoints and the first steps."
    )
    phases: dict[str, PhaseTime] = Field(
        description="`data`, `compute`, `exchange`, `validate`, `checkpoint` and `other`."
    )
    step_p50_s: NonNegativeFloat | None = None
    step_p95_s: NonNegativeFloat | None = None
    wire_bytes: NonNegativeInt = Field(description="Given to the network for other ranks.")
    cpu_s: NonNegativeFloat
    peak_memory_bytes: NonNegativeInt = Field(description="Resident.")
    major_faults: NonNegativeInt = Field(description="Pages read back from disk or swap.")
    preemptions: NonNegativeInt = Field(description="Times that another process took the core.")
    busy_cores_mean: NonNegativeFloat | None = Field(description="None where never sampled.")
    busy_cores_max: NonNegativeFloat | None
    disk_read_bytes: NonNegativeInt | None
    disk_written_bytes: NonNegativeInt | None


class HostTelemetry(Contract):
    """The driver's host while a training run lasted, everything else on it included."""

    name: str
    num_cores: PositiveInt
    memory_bytes: PositiveInt
    cpu_share_mean: float | None = Field(description="Of all cores; None where never sampled.")
    cpu_share_max: float | None
    temperature_max_c: float | None = Field(description="Hottest sensor; None without sensors.")
    network_sent_bytes: NonNegativeInt = Field(description="All interfaces but loopback.")
    network_received_bytes: NonNegativeInt
    loopback_bytes: NonNegativeInt
    swapped_in_bytes: NonNegativeInt


class DeviceTelemetry(Contract):
    """One accelerator while a training run lasted; None for what its driver does not tell."""

    index: NonNegativeInt
    name: str
    utilisation_mean: float | None = Field(description="Share of time with a kernel running.")
    utilisation_max: float | None
    peak_memory_bytes: NonNegativeInt | None
    temperature_max_c: float | None
    power_mean_w: float | None
    energy_j: float | None


class EnergyUse(Contract):
    """Joules of a training run, and how they are known; never made up."""

    joules: NonNegativeFloat | None = Field(description="None where nothing could be measured.")
    known_by: str = Field(description="What was measured or estimated, or why nothing could be.")
    estimated: bool = Field(default=False, description="True where no meter was read.")


class RunCost(Contract):
    """Money that a training run took, at the prices of the configuration."""

    amount: NonNegativeFloat
    currency: str
    energy_part: NonNegativeFloat | None = Field(description="None without energy or its price.")
    node_part: NonNegativeFloat | None = Field(description="None without a price of node hours.")


Setting = bool | int | float | str


class Finding(Contract):
    """One thing that holds a training run back, with its evidence."""

    kind: Literal["input", "communication", "compute", "memory", "imbalance"]
    share: float = Field(ge=0, le=1, description="Of the ranks' time in training steps.")
    evidence: str = Field(description="A sentence with the numbers.")
    advice: str = Field(description="A sentence: what to change, or that nothing can be.")
    suggestions: dict[str, Setting] = Field(
        default={}, description="Dotted field of the training configuration to a better value."
    )


class Diagnosis(Contract):
    """Where the time of a training run goes; the heaviest finding first, none when balanced."""

    summary: str
    findings: tuple[Finding, ...] = ()


class TrainingTelemetry(Contract):
    """What a training run took: time, memory, network, energy and money."""

    seconds: NonNegativeFloat = Field(description="Wall seconds, all attempts.")
    num_attempts: PositiveInt
    num_samples: NonNegativeInt = Field(description="Samples of the last attempt.")
    ranks: tuple[RankTelemetry, ...] = Field(description="Of the last attempt.")
    host: HostTelemetry
    devices: tuple[DeviceTelemetry, ...] = ()
    energy: EnergyUse
    cost: RunCost | None = Field(default=None, description="None without a price.")
    diagnosis: Diagnosis | None = None
    applied: tuple[str, ...] = Field(
        default=(), description="Settings that were taken from an earlier diagnosis, in sentences."
    )


class StartingPoint(Contract):
    """A registered version whose weights a training may begin with."""

    version: ModelVersionRef
    checkpoint: Artifact = Field(description="Its best epoch, with its fitted preprocessing.")
    columns: DatasetSchema
    trained_on: TimeWindow


class TrainedModel(Contract):
    """The best epoch of a training run."""

    program: Artifact = Field(
        description="`torch.export` program (.pt2), preprocessing inside: takes `categorical` "
        "int32 (rows, c) and `numeric` float32 (rows, n), gives `score` float32 (rows,)."
    )
    checkpoint: Artifact = Field(description="Plain state dict of the best epoch.")
    log: Artifact = Field(description="Full log of all ranks.")
    columns: DatasetSchema
    config: dict[str, object] = Field(description="The training configuration, whole.")
    snapshot_sha256: str
    splits: DataSplits
    epochs: tuple[EpochMetrics, ...]
    best_epoch: NonNegativeInt
    num_ranks: PositiveInt
    strategy: str = Field(description="Engine that exchanged the gradients, such as `horovod`.")
    num_parameters: PositiveInt
    seconds: float
    energy_j: float | None = Field(default=None, description="Joules, None where not measurable.")
    launch: str = Field(default="", description="Ranks and threads, and why so many.")
    reading: str = Field(default="", description="How rows were read, and why.")
    telemetry: TrainingTelemetry | None = None
    kept: tuple[Artifact, ...] = Field(
        default=(),
        description="What else the run left: traces of a profile, the story of elastic ranks.",
    )
    started_from: StartingPoint | None = Field(
        default=None, description="Whose weights it began with; None for none."
    )


class SearchedField(Contract):
    """One dimension of a search: a field of the training configuration and what it may be."""

    name: str
    low: float | None = Field(default=None, description="Bounds of a number, both included.")
    high: float | None = None
    log: bool = False
    choices: tuple[str, ...] = Field(default=(), description="JSON of each value of a choice.")


class TrialRecord(Contract):
    """One trial of a search, as its study keeps it."""

    number: NonNegativeInt
    state: Literal["complete", "pruned", "failed"]
    point: dict[str, float | int | str] = Field(description="Field to value; a choice is its JSON.")
    auc: float | None = Field(description="Best validation AUC; None where no epoch was finished.")
    r2: float | None = Field(default=None, description="Best validation R2, of a regression.")
    epochs: tuple[EpochMetrics, ...]
    seconds: float = Field(description="Training seconds; 0 for what was found trained already.")
    reason: str = Field(default="", description="Why it was pruned or failed.")
    repeats: NonNegativeInt | None = Field(
        default=None, description="Earlier trial of the same point, whose outcome this one has."
    )
    attempts: PositiveInt = Field(default=1, description="More than 1 where it was taken up again.")

    @property
    def quality(self) -> float | None:
        """What trials are compared by; more is better."""
        return self.auc if self.r2 is None else self.r2

    @property
    def quality_name(self) -> str:
        """Its name, for people."""
        return AUC_NAME if self.r2 is None else R2_NAME


class StudyRecord(Contract):
    """A search as far as it has come: its space, its trials, and what they show."""

    study: str = Field(description="Name of the study; ends in a digest of data, space and code.")
    use_case: str
    task: TaskKind = "classification"
    fields: tuple[SearchedField, ...]
    trials: tuple[TrialRecord, ...]
    best: NonNegativeInt | None = Field(description="Number of the best complete trial.")
    importance: dict[str, float] = Field(
        description="Field to its share of the variance of AUC or R2 over the space (fANOVA); "
        "empty where there are too few complete trials to say."
    )
    sampler: str
    pruner: str
    storage: Literal["sqlite", "postgresql"]
    max_epochs: PositiveInt
    ended_because: str = Field(description="Why no further trial was started.")

    @property
    def quality_name(self) -> str:
        """What trials are compared by, for people."""
        return R2_NAME if self.task == "regression" else AUC_NAME


class Metric(Contract):
    """A number with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class MetricSet(Contract):
    """Quality of one set of scores on one set of rows, of a classification."""

    primary_name: ClassVar[str] = AUC_NAME

    num_rows: PositiveInt
    base_rate: float
    auc: Metric
    pr_auc: Metric
    brier: Metric
    log_loss: Metric
    calibration_error: Metric

    @property
    def primary(self) -> Metric:
        """What models are compared by; more is better."""
        return self.auc


class RegressionMetrics(Contract):
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
    skill: Metric | None = Field(
        description="1 minus the mean squared error over that of the baseline, on the rows where "
        "it is known; above 0 is better than the baseline. None without a baseline."
    )

    @property
    def primary(self) -> Metric:
        """What models are compared by; more is better."""
        return self.r2


Quality = MetricSet | RegressionMetrics


class SliceMetrics(Contract):
    """Quality on the rows where `column` equals `value`."""

    column: str
    value: str
    metrics: Quality


class PairedComparison(Contract):
    """Candidate minus another model on the same rows, same bootstrap replicates."""

    error_name: ClassVar[str] = "Brier score"

    against: str = Field(description="`champion:<version>` or `yardstick`.")
    auc_difference: Metric
    brier_difference: Metric

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

    against: str = Field(description="`champion:<version>`, `yardstick` or `baseline`.")
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


class Yardstick(Contract):
    """Scores of a well-known kind of model on the test rows: what the data gives without effort."""

    name: str = Field(description="The kind of model, its library and its size.")
    snapshot_sha256: str
    splits: DataSplits
    scores: Artifact = Field(
        description="Parquet, in the order of the snapshot: row id, yardstick_score."
    )


class ScoredWindow(Contract):
    """Scores of one model on all rows of one window, and their quality where labels exist."""

    program_sha256: str
    snapshot_sha256: str
    window: TimeWindow
    num_rows: PositiveInt
    scores: Artifact = Field(
        description="Parquet, in the order of the snapshot: row id, event time, label, score."
    )
    metrics: Quality | None = Field(description="Of the labelled rows; None where too few.")
    excess_brier: Metric | None = Field(
        description="Brier score minus what the scores themselves promise, the mean of p (1 - p): "
        "above 0 the model errs more than it says, below 0 less."
    )
    unjudged: str | None = Field(default=None, description="Why there are no metrics.")


class EvaluationReport(Contract):
    """Judgement of one trained model on the test window."""

    model_sha256: str = Field(description="Digest of the judged program.")
    snapshot_sha256: str
    window: TimeWindow
    overall: Quality
    slices: tuple[SliceMetrics, ...]
    skipped_slices: tuple[str, ...] = Field(description="Slices too small to judge, with counts.")
    yardstick: Quality
    yardstick_name: str
    baseline: RegressionMetrics | None = Field(
        default=None, description="Of the baseline as a model, on the rows where it is known."
    )
    baseline_name: str | None = Field(default=None, description="Its column.")
    comparisons: tuple[Comparison, ...]
    predictions: Artifact = Field(
        description="Parquet: row id, event time, label, score, yardstick_score, champion_score."
    )
    roc: tuple[CurvePoint, ...] = Field(description="None of a regression, as the next two.")
    precision_recall: tuple[CurvePoint, ...]
    calibration: tuple[CurvePoint, ...] = Field(description="x mean score, y rate, weight rows.")
    observed: tuple[ValueBand, ...] = Field(
        default=(), description="Labels by prediction, lowest first; of a regression."
    )
    residuals: tuple[CurvePoint, ...] = Field(
        default=(),
        description="x middle of a class of errors (prediction minus label), y its width, weight "
        "rows; of a regression. The outermost classes hold all beyond.",
    )


class VariantLatency(Contract):
    """Latency of one variant at one batch size, one thread, against PyTorch eager beside it."""

    batch_rows: PositiveInt
    p50_ms: float
    p95_ms: float
    ratio_to_eager: float = Field(description="Median of paired ratios; below 1 is faster.")
    ratio_to_replaced: float | None = Field(
        default=None, description="Against the simpler variant it would replace, paired."
    )


class SearchResult(Contract):
    """Result of `search`: the study, and the best trial's model, ready to be judged."""

    study: StudyRecord
    model: TrainedModel
    page: str = Field(description="Path of the page below the state folder.")
    version: ModelVersionRef | None = Field(
        default=None, description="The registered candidate; None where none was asked for."
    )


class TrainingResult(Contract):
    """Result of `training`: a judged candidate in the registry, and what it was made from."""

    dataset: ValidatedDataset
    model: TrainedModel
    evaluation: EvaluationReport
    version: ModelVersionRef


class BuiltVariant(Contract):
    """One converted form as it was built, before anything judged it."""

    name: str = Field(description="Such as `onnx-fp32`.")
    format: str
    precision: str
    files: Artifact | None = Field(description="Folder of the variant; None where none was built.")
    failure: str | None = Field(default=None, description="Why it could not be built.")
    settings: dict[str, str] = Field(description="Opset, versions, calibration: how it was built.")


class ModelVariant(Contract):
    """One converted form of a model, kept or dropped, with the reason."""

    name: str = Field(description="Such as `onnx-fp32`.")
    format: str
    precision: str
    hardware_class: str
    files: Artifact | None = Field(description="Folder of the variant; None where none was built.")
    source_sha256: str = Field(description="Digest of the program it was made from.")
    parity_max: float | None = Field(
        description="Largest gap of a score: a probability, or in standard deviations of the label."
    )
    parity_mean: float | None
    auc_change: Metric | None = Field(description="Variant minus source on the test rows.")
    r2_change: Metric | None = Field(default=None, description="The same, of a regression.")
    latencies: tuple[VariantLatency, ...]
    num_bytes: NonNegativeInt
    load_ms: float | None
    kept: bool
    reason: str
    settings: dict[str, str] = Field(
        description="Precision, threads, runtime version, as read back."
    )

    @property
    def quality_change(self) -> Metric | None:
        """Change of the metric that models are compared by."""
        return self.auc_change if self.r2_change is None else self.r2_change


class ModelVersionRef(Contract):
    """One version in the model registry."""

    name: str = Field(description="Registered model.")
    version: PositiveInt = Field(description="Its number, counted from 1.")
    run_id: str = Field(description="MLflow run that made it.")
    program_sha256: str = Field(description="Digest of the exported program.")
    snapshot_sha256: str = Field(description="Digest of the rows it was trained on.")


class RegisteredProgram(Contract):
    """A registered model version whose program was fetched into the artifact store, verified."""

    version: ModelVersionRef
    program: Artifact
    columns: DatasetSchema


class FeatureDrift(Contract):
    """Change of one feature between the reference and the current window."""

    feature: str
    kind: str = Field(description="`numeric` or `categorical`.")
    psi: float
    psi_noise: float = Field(description="PSI expected from sampling alone.")
    effect: float = Field(description="KS distance or total variation distance, 0 to 1.")
    effect_low: float = Field(description="Lower confidence bound of the effect.")
    missing_reference: float
    missing_current: float
    drifted: bool
    evidence: str


class DriftVerdict(StrEnum):
    """What a drift check advises; whether to act on it is for the caller."""

    STABLE = "stable"
    WATCH = "watch"
    RETRAIN = "retrain"
    DATA_FAULT = "data_fault"


class DriftReport(Contract):
    """Comparison of a current window with the training reference."""

    reference: TimeWindow
    current: TimeWindow
    num_reference_rows: PositiveInt
    num_current_rows: PositiveInt
    features: tuple[FeatureDrift, ...]
    prediction: FeatureDrift
    reference_performance: Quality | None
    current_performance: Quality | None
    auc_change: Metric | None = Field(description="Current minus reference; None without labels.")
    effect_threshold: float | None = Field(
        default=None, description="Lower bound of the effect from which a feature has drifted."
    )
    excess_brier_change: Metric | None = Field(
        default=None, description="`ScoredWindow.excess_brier`, current minus reference."
    )
    r2_change: Metric | None = Field(
        default=None, description="Of a regression, current minus reference."
    )
    skill_change: Metric | None = Field(
        default=None, description="Of `RegressionMetrics.skill`, current minus reference."
    )
    performance_reference: TimeWindow | None = Field(
        default=None, description="Reference of predictions and performance: rows not trained on."
    )
    verdict: DriftVerdict
    evidence: tuple[str, ...]


class GateResult(Contract):
    """One gate of a promotion."""

    name: str
    passed: bool
    evidence: str


class Approval(Contract):
    """What a person said about a candidate, or that nobody has said anything yet."""

    state: Literal["waiting", "approved", "rejected", "timed_out"]
    asked: datetime
    deadline: datetime = Field(description="Moment from which no answer means no.")
    approver: str | None = Field(default=None, description="As told; None where nobody answered.")
    comment: str = ""
    answered: datetime | None = None


class PromotionDecision(Contract):
    """All gates of one promotion, and what was done."""

    candidate: ModelVersionRef
    previous_champion: int | None
    gates: tuple[GateResult, ...]
    promoted: bool
    approval: Approval | None = Field(
        default=None, description="None where no person was asked: none required, or a gate closed."
    )


class StageRoute(Contract):
    """Where a stage ran, and by which rule it was sent there."""

    wanted: str = Field(description="Hardware class that the configuration asks for.")
    taken: str = Field(description="`this process`, or the deployment that ran it.")
    pool: str | None = Field(default=None, description="Work pool of the deployment.")
    rule: Literal["in process", "wanted class", "fall back", "burst", "taken up again"]
    reason: str = Field(description="Why there, in a sentence.")
    refused: tuple[str, ...] = Field(
        default=(), description="Places that were asked before and why each was not taken."
    )
    flow_run: str | None = Field(default=None, description="Id of the run on the work pool.")


class ChampionStanding(Contract):
    """The champion, how it came to be that, and whether the one before it could serve again."""

    version: ModelVersionRef
    promoted_at: datetime | None = Field(
        description="When a promotion made it champion; None where that is not known, or where a "
        "roll back did."
    )
    former: ModelVersionRef | None = Field(description="The champion before it.")
    former_trouble: str | None = Field(
        description="Why the former cannot serve: files that are missing or damaged."
    )


class Rollback(Contract):
    """One roll back: whose place was taken by which earlier champion, and why."""

    restored: ModelVersionRef
    replaced: ModelVersionRef
    reason: str
    order_id: str = Field(description="The episode that asked for it; repeating it changes nothing")
    at: datetime


class StageTime(Contract):
    """Wall time of one stage of a run."""

    stage: str
    seconds: float
    reused: bool
    route: StageRoute | None = Field(default=None, description="Null in records before 2026-11-21.")


class RunRecord(Contract):
    """Everything one run of the loop did; the report shows it and `report.json` holds it."""

    use_case: str
    question: str
    run_id: str
    started: datetime
    code_commit: str
    host: dict[str, str] = Field(description="CPU, cores, memory, versions of named packages.")
    refresh: FeatureRefresh
    dataset: ValidatedDataset
    model: TrainedModel
    evaluation: EvaluationReport
    version: ModelVersionRef
    variants: tuple[ModelVariant, ...]
    promotion: PromotionDecision
    drift: DriftReport
    stages: tuple[StageTime, ...]
