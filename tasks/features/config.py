"""What a feature repository says about its data: raw tables, feature tables, training set."""

import json
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tasks.contracts.data import TaskKind
from tasks.features.tables.raw_files import FrozenConfig, Identifier, RawTable

CLOCK_SKEW = timedelta(minutes=5)
"""So far may another clock be ahead of ours."""

LONGEST_LAG = timedelta(days=1)
"""So far may `created` lie ahead: it is often event time plus the lag of a pipeline."""


def _stays_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} leaves the feature repository; name a file inside it")
    return name


RepositoryFile = Annotated[str, AfterValidator(_stays_inside)]


class StagingQuery(FrozenConfig):
    """A query over the raw tables that feature queries and the training set may read."""

    name: Identifier = Field(description="Table that the queries read.")
    sql: RepositoryFile = Field(description="File of the query in the feature repository.")


class FeatureTable(FrozenConfig):
    """One table of features, the source of one feature view.

    Its query gives the entity keys, `event_timestamp` (the moment from which the values are known),
    `created` (the moment at which they are in the store) and the features.
    """

    name: Identifier = Field(description="Table, and the feature view that reads it.")
    sql: RepositoryFile = Field(description="File of the query in the feature repository.")
    parameters: dict[Identifier, str] = Field(
        default={}, description="Texts that take the place of `${name}` in the query."
    )
    entity_keys: tuple[Identifier, ...] = Field(
        min_length=1, description="Columns that name the entity."
    )
    lookback_hours: NonNegativeInt = Field(
        description="A row depends on no raw row older than this; 0 for a static table."
    )
    known_ahead_hours: NonNegativeInt = Field(
        default=0,
        description="A raw row may be dated so many hours after the moment from which the values "
        "are known, as in a timetable or a forecast.",
    )
    static: bool = Field(default=False, description="Replaced whole at each refresh.")
    unbounded: tuple[Identifier, ...] = Field(
        default=(),
        description="Columns that may hold infinite numbers and any magnitude; elsewhere such "
        "values are refused.",
    )
    suite: str = Field(min_length=1, description="Expectation suite that judges the table.")


class TrainingSet(FrozenConfig):
    """How training rows are made: the entity frame, its label and what the model may see of it."""

    task: TaskKind = Field(
        default="classification",
        description="`classification`: the label is 0 or 1. `regression`: it is a number.",
    )
    sql: RepositoryFile = Field(description="File of the query that gives the entity frame.")
    feature_service: Identifier = Field(description="Feast feature service to retrieve.")
    suite: str = Field(min_length=1, description="Expectation suite that judges the rows.")
    row_id: Identifier = Field(description="Column that names a row.")
    label: Identifier = Field(description="Column that the model learns to predict.")
    label_definition: str = Field(
        min_length=1, description="What a label of 1, or the label's number, means, in words."
    )
    label_unit: str = Field(
        default="", max_length=30, description="Unit of a label that is a number, for people."
    )
    baseline: str | None = Field(
        default=None,
        description="Number among the model's inputs that is itself the plainest prediction of the "
        "label, such as its last known value; a regression is judged by what it adds to it.",
    )
    exclusion: Identifier = Field(description="Column that says why a row carries no label.")
    categorical: tuple[Identifier, ...] = Field(
        description="Columns of the entity frame that the model takes as categories."
    )
    numeric: tuple[Identifier, ...] = Field(
        description="Columns of the entity frame that the model takes as numbers."
    )
    unbounded: tuple[Identifier, ...] = Field(
        default=(), description="Columns of the entity frame that may hold infinite numbers."
    )
    trusted: tuple[str, ...] = Field(
        default=(),
        description="Inputs, such as `view__feature`, that are known in time although they carry "
        "nearly all that the model knows: no leak is suspected in them.",
    )

    @model_validator(mode="after")
    def _baseline_is_of_a_number(self) -> Self:
        if self.task == "classification" and (self.baseline or self.label_unit):
            raise ValueError(
                "baseline and label_unit are of a label that is a number; set task to regression "
                "or leave them out"
            )
        return self


class MaterializationConfig(FrozenConfig):
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


class ViewPolicy(FrozenConfig):
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


class OnlineConfig(FrozenConfig):
    """How features are read online: freshness, and patience with the store."""

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


class FeatureConfig(FrozenConfig):
    """Everything the feature stages need to know about one use case."""

    raw_tables: tuple[RawTable, ...] = Field(
        min_length=1, description="Tables as they come from outside."
    )
    staging: tuple[StagingQuery, ...] = Field(
        default=(), description="Queries that others read; each may read those before it."
    )
    feature_tables: tuple[FeatureTable, ...] = Field(
        min_length=1, description="Tables of features, each the source of one feature view."
    )
    training_set: TrainingSet
    adopts: str | None = Field(
        default=None,
        min_length=12,
        description="Version of the published tables that these data continue although they look "
        "like other data; the refusal names it.",
    )
    materialization: MaterializationConfig = MaterializationConfig()
    online: OnlineConfig = OnlineConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        # A raw and a feature table may share a name: they live in different folders.
        for group in (self.raw_tables, self.staging, self.feature_tables):
            names = [table.name for table in group]
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"table {', '.join(repeated)} is declared twice")
        return self


def recorded_config(text: str) -> FeatureConfig:
    """A configuration kept as JSON by this or an earlier version, without settings gone since."""
    given = json.loads(text)
    for part, model in (("online", OnlineConfig), ("training_set", TrainingSet)):
        given[part] = {k: v for k, v in given[part].items() if k in model.model_fields}
    return FeatureConfig(**{k: v for k, v in given.items() if k in FeatureConfig.model_fields})
