"""What a feature repository says about its data: raw tables, feature tables, training set."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

ColumnType = Literal["BIGINT", "INTEGER", "DOUBLE", "FLOAT", "VARCHAR", "BOOLEAN", "TIMESTAMPTZ"]
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]


def _stays_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} leaves the feature repository; name a file inside it")
    return name


RepositoryFile = Annotated[str, AfterValidator(_stays_inside)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RawTable(_Config):
    """One table as it comes from outside."""

    name: Identifier
    uri: str = Field(
        min_length=1,
        description="`package://<package>/<file>`, or the path of a CSV, zipped CSV or Parquet "
        "file, relative to the feature repository.",
    )
    columns: dict[Identifier, ColumnType] = Field(min_length=1, description="Name to type.")
    key: tuple[Identifier, ...] = Field(min_length=1, description="Columns that name one row.")
    time_column: Identifier | None = Field(
        default=None,
        description="Column that places a row in a window; none for a table without history.",
    )
    null_text: str = Field(default="NA", description="Text that stands for a missing value.")
    suite: str = Field(min_length=1, description="Expectation suite for its rows.")

    @model_validator(mode="after")
    def _columns_are_declared(self) -> Self:
        named = {*self.key, *([self.time_column] if self.time_column else [])}
        if unknown := sorted(named - self.columns.keys()):
            raise ValueError(
                f"raw table {self.name}: key or time column {', '.join(unknown)} is not among its "
                "columns"
            )
        if self.time_column and self.columns[self.time_column] != "TIMESTAMPTZ":
            raise ValueError(
                f"raw table {self.name}: time column {self.time_column} must be TIMESTAMPTZ, a "
                "moment with its time zone"
            )
        return self


class StagingQuery(_Config):
    """A query over the raw tables that feature queries and the training set may read."""

    name: Identifier
    sql: RepositoryFile


class FeatureTable(_Config):
    """One table of features, the source of one feature view.

    Its query gives the entity keys, `event_timestamp` (the moment from which the values are known),
    `created` (the moment at which they are in the store) and the features.
    """

    name: Identifier
    sql: RepositoryFile
    entity_keys: tuple[Identifier, ...] = Field(min_length=1)
    lookback_hours: NonNegativeInt = Field(
        description="A row depends on no raw row older than this; 0 for a static table."
    )
    static: bool = Field(default=False, description="Replaced whole at each refresh.")
    suite: str = Field(min_length=1)


class TrainingSet(_Config):
    """How training rows are made: the entity frame, its label and what the model may see of it."""

    sql: RepositoryFile
    feature_service: Identifier
    suite: str = Field(min_length=1)
    row_id: Identifier
    event_time: Identifier = "event_timestamp"
    label: Identifier
    label_definition: str = Field(min_length=1, description="What a label of 1 means, in words.")
    exclusion: Identifier = Field(description="Column that says why a row carries no label.")
    categorical: tuple[Identifier, ...] = Field(
        description="Columns of the entity frame that the model takes as categories."
    )
    numeric: tuple[Identifier, ...] = Field(
        description="Columns of the entity frame that the model takes as numbers."
    )


class MaterializationConfig(_Config):
    """How far each materialization reaches back."""

    lateness_hours: float = Field(
        default=24.0,
        ge=0,
        le=24 * 366,
        description="Rows may arrive this many hours after their window: so far back, before its "
        "start, each materialization writes again.",
    )
    earlier_versions: NonNegativeInt = Field(
        default=1,
        le=100,
        description="So many versions of each service before its newest are written too, for "
        "models that still read them.",
    )


class ViewPolicy(_Config):
    """What an online read does with a view's value that is too old, or was never written."""

    stale: Literal["null", "serve", "refuse"] = Field(
        default="null",
        description="A value older than its view's TTL: left blank, as in training (null), given "
        "and marked (serve), or the whole read fails (refuse).",
    )
    missing: Literal["null", "refuse"] = Field(
        default="null",
        description="An entity that was never written or has a null key: left blank, or the whole "
        "read fails.",
    )


class OnlineConfig(_Config):
    """How features are read online: freshness, patience with the store, what is measured."""

    policy: ViewPolicy = Field(default=ViewPolicy(), description="For views not named below.")
    view_policies: dict[str, ViewPolicy] = Field(
        default={}, description="Feature view to its own policy."
    )
    clock_tolerance_s: NonNegativeFloat = Field(
        default=5.0,
        description="Seconds by which a value may lie after the moment of the read; more, and it "
        "is from the future and treated as stale.",
    )
    timeout_s: PositiveFloat = Field(
        default=0.5, description="Seconds that connecting, or one answer of the store, may take."
    )
    max_connections: PositiveInt = Field(
        default=16, description="Connections to the store, and so reads at one time."
    )
    first_pause_s: PositiveFloat = Field(
        default=0.2, description="Seconds without a new attempt after the store failed once."
    )
    longest_pause_s: PositiveFloat = Field(
        default=10.0, description="The pause doubles with each failure up to this many seconds."
    )
    age_bounds_s: tuple[PositiveFloat, ...] = Field(
        default=(60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86400, 2 * 86400, 7 * 86400, 28 * 86400),
        min_length=1,
        description="Upper bounds, in seconds, of the classes in which ages are counted.",
    )

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if list(self.age_bounds_s) != sorted(set(self.age_bounds_s)):
            raise ValueError(f"age_bounds_s {self.age_bounds_s} do not rise; put them in order")
        if self.longest_pause_s < self.first_pause_s:
            raise ValueError(
                f"longest_pause_s={self.longest_pause_s} is less than first_pause_s="
                f"{self.first_pause_s}"
            )
        return self


class ParityConfig(_Config):
    """How online values are compared with historical retrieval."""

    entities_per_view: PositiveInt = Field(
        default=500, description="Entities drawn of each view; all where there are fewer."
    )
    seed: NonNegativeInt = Field(default=0, description="Which entities are drawn.")
    max_examples: NonNegativeInt = Field(
        default=20, description="Differences that are told one by one; all are counted."
    )


class SkewConfig(_Config):
    """When logged serving features count as different from later historical retrieval."""

    max_differing_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of a feature's logged values that may differ."
    )
    batch_rows: PositiveInt = Field(
        default=50_000, description="Logged rows that are compared at one time."
    )


class FeatureConfig(_Config):
    """Everything the feature stages need to know about one use case."""

    raw_tables: tuple[RawTable, ...] = Field(min_length=1)
    staging: tuple[StagingQuery, ...] = ()
    feature_tables: tuple[FeatureTable, ...] = Field(min_length=1)
    training_set: TrainingSet
    memory_limit_mb: PositiveInt = Field(default=3000, description="DuckDB may hold this much.")
    threads: PositiveInt = Field(default=2, description="DuckDB threads.")
    materialization: MaterializationConfig = MaterializationConfig()
    online: OnlineConfig = OnlineConfig()
    parity: ParityConfig = ParityConfig()
    skew: SkewConfig = SkewConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        # A raw and a feature table may share a name: they live in different folders.
        groups = (
            [t.name for t in self.raw_tables],
            [t.name for t in self.staging],
            [t.name for t in self.feature_tables],
        )
        for group in groups:
            if repeated := sorted({name for name in group if group.count(name) > 1}):
                raise ValueError(f"table {', '.join(repeated)} is declared twice")
        return self
