"""What a feature repository says about its data: raw tables, feature tables, training set."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
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


class FeatureConfig(_Config):
    """Everything the feature stages need to know about one use case."""

    raw_tables: tuple[RawTable, ...] = Field(min_length=1)
    staging: tuple[StagingQuery, ...] = ()
    feature_tables: tuple[FeatureTable, ...] = Field(min_length=1)
    training_set: TrainingSet
    memory_limit_mb: PositiveInt = Field(default=3000, description="DuckDB may hold this much.")
    threads: PositiveInt = Field(default=2, description="DuckDB threads.")

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
