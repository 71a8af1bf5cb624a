"""What one run of the loop is asked to do: one value, read from the feature repository."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any, Self
from zoneinfo import ZoneInfo

from pydantic import AliasChoices, Field, PositiveInt, ValidationError, model_validator

from tasks.contracts.base import TimeWindow
from tasks.contracts.clock import ClockConfig
from tasks.contracts.data import DataSplits
from tasks.control.config import RetrainingPolicy, RoutingConfig, StageLease
from tasks.conversion.config import ConversionConfig
from tasks.evaluation.config import (
    BaselineModelConfig,
    DriftConfig,
    EvaluationConfig,
    MonitoringConfig,
    RecalibrationConfig,
)
from tasks.features.config import FeatureConfig
from tasks.governance.handling import DataClass
from tasks.imports.config import CorpusConfig, EncoderConfig, ProgramConfig, RowsConfig
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import USE_CASE_FILE, USE_CASE_NAME, Settings, no_project
from tasks.kernel.values import Described, checked, faults
from tasks.registry.config import PromotionConfig, RegistryConfig, named_after
from tasks.release.config import ReleaseConfig
from tasks.training.compression.config import CompressionConfig
from tasks.training.config import TrainingConfig, model_trained
from tasks.training.search.config import SearchConfig, check_space
from tasks.validation.suites import Suite, check_baseline, has_suite, read_suite

NEWEST = timedelta(days=30)
"""The drift check of a run looks at least at so much of the test window, where it is that long."""


class SplitDates(Described):
    """Splits that follow on one another, by the days on which they begin."""

    start: datetime = Field(description="Begin of the window and of training.")
    validation: datetime = Field(description="Begin of validation, end of training.")
    test: datetime = Field(description="Begin of the test, end of validation.")
    end: datetime = Field(description="End of the test and of the window.")

    def splits(self, zone: str) -> DataSplits:
        """The splits themselves.

        Args:
            zone: where a day begins that is written without a time.
        """
        moments = [
            d if d.tzinfo or d.time() != time.min else d.replace(tzinfo=ZoneInfo(zone))
            for d in (self.start, self.validation, self.test, self.end)
        ]
        return DataSplits.between(*moments)


SHORT_SPLITS = "{start: 2024-01-01, validation: 2024-05-01, test: 2024-06-01, end: 2024-07-01}"


def _window(given: dict[str, Any]) -> TimeWindow:
    splits: DataSplits = given["splits"]
    return TimeWindow(start=splits.train.start, end=splits.test.end)


def _current(given: dict[str, Any]) -> TimeWindow:
    """The newest of the test window whose labels are known, if the data end with it.

    Where a label is known later than the test window is long, data must go on after it.
    """
    test, spec = given["splits"].test, given["features"].training_set
    end = test.end - spec.label_lag
    end = end if end > test.start else test.end
    return TimeWindow(start=max(test.start, end - max((end - test.start) / 6, NEWEST)), end=end)


class PipelineConfig(Described):
    """One use case: its data, its windows, and how each stage is to be done."""

    name: str = Field(pattern=USE_CASE_NAME, max_length=60, description="Use case.")
    question: str = Field(min_length=1, description="What the model answers, for people.")
    clock: ClockConfig = ClockConfig()
    features: FeatureConfig
    splits: DataSplits = Field(
        description="Days on which training, validation and test begin, and the end: "
        f"`{SHORT_SPLITS}`; or `train`, `validation` and `test`, each with `start` and `end`."
    )
    window: TimeWindow = Field(default_factory=_window)
    """Window that is refreshed and retrieved; by default that of all splits."""
    current: TimeWindow = Field(default_factory=_current)
    """Window that the drift check looks at; by default the
    newest of the test window with known labels."""
    monitoring: MonitoringConfig = MonitoringConfig()
    training: TrainingConfig = TrainingConfig()
    lease: StageLease = StageLease()
    search: SearchConfig = SearchConfig()
    compression: CompressionConfig = Field(
        default=CompressionConfig(), validation_alias=AliasChoices("compression", "shrinking")
    )
    baseline_model: BaselineModelConfig = BaselineModelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    conversion: ConversionConfig = ConversionConfig()
    drift: DriftConfig = DriftConfig()
    recalibration: RecalibrationConfig = RecalibrationConfig()
    retraining: RetrainingPolicy = RetrainingPolicy()
    registry: RegistryConfig = RegistryConfig()
    promotion: PromotionConfig = PromotionConfig()
    release: ReleaseConfig = ReleaseConfig()
    routing: RoutingConfig = RoutingConfig()
    retention: dict[DataClass, PositiveInt] = Field(
        default={},
        description="Days for which landed rows and training sets are kept, by data class, such as "
        "`personal: 365`; `falaj prune` removes older ones, whatever names them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _said_once(cls, given: Any) -> Any:
        """Splits may be given by their days; the use case's name also names model and runs."""
        if not isinstance(given, dict):
            return given
        splits, clock = given.get("splits"), given.get("clock")
        if isinstance(splits, dict) and "train" not in splits:
            try:
                zone = ClockConfig.model_validate(clock or {}).time_zone
                given = {**given, "splits": SplitDates.model_validate(splits).splits(zone)}
            except ValidationError as exc:
                raise ValueError(
                    f"splits or clock: {faults(exc)}; expected such as splits: {SHORT_SPLITS}"
                ) from exc
        name, registry = given.get("name"), given.get("registry", {})
        if isinstance(name, str) and isinstance(registry, dict):
            given = {**given, "registry": named_after(name) | registry}
        return given

    @model_validator(mode="after")
    def _clock_waits_for_labels(self) -> Self:
        """Schedules wait as long as the training set says, where the clock itself says nothing."""
        spec = self.features.training_set
        if spec.label_known_after and "label_hours" not in self.clock.model_fields_set:
            wait = spec.label_lag / timedelta(hours=1)
            object.__setattr__(self, "clock", self.clock.model_copy(update={"label_hours": wait}))
        return self

    _model = model_validator(mode="before")(model_trained)

    @model_validator(mode="after")
    def _windows_lie_inside(self) -> Self:
        for name, window in self.splits:
            if not self.window.contains(window):
                raise ValueError(
                    f"splits.{name} ({window}) reaches outside the window that is refreshed "
                    f"({self.window}); widen the one or narrow the other"
                )
        return self

    @model_validator(mode="after")
    def _volume_is_of_a_table_with_history(self) -> Self:
        volume = self.drift.volume
        dated = [table.name for table in self.features.raw_tables if table.time_column]
        if volume and volume.table not in dated:
            raise ValueError(
                f"drift.volume.table={volume.table!r} is no raw table with a time column; expected "
                f"one of {', '.join(dated) or 'such a table, and there is none'}"
            )
        return self

    @model_validator(mode="after")
    def _several_classes_are_carried(self) -> Self:
        """Refuse, of several classes, what knows one score a row alone."""
        if self.features.training_set.classes:
            if self.training.own_model:
                raise ValueError(
                    f"model {self.training.model} gives one number a row, and task multi-class "
                    "needs one a class; expected network, gradient-boosting or average"
                )
            if self.release.task == "auc":
                raise ValueError(
                    "release.task auc is of a label that is 0 or 1; of several classes leave it out"
                )
        return self

    def refuse_several_classes(self, what: str) -> None:
        """Refuse what is not offered where the label is one of several classes.

        Raises:
            ConfigurationError: it is.
        """
        if classes := self.features.training_set.class_names:
            raise ConfigurationError(
                f"{what} is for models of one score a row, and {self.name} has task multi-class "
                f"({', '.join(classes)}); expected classification or regression. Nothing was "
                "changed; retrain with `falaj run`"
            )

    @model_validator(mode="after")
    def _search_is_of_the_training(self) -> Self:
        check_space(self.training, self.search)
        return self

    def with_splits(self, splits: DataSplits) -> PipelineConfig:
        """The use case with these splits, on rows up to the end of the last of them."""
        window = TimeWindow(start=min(self.window.start, splits.train.start), end=splits.test.end)
        return self.model_copy(update={"window": window, "splits": splits})

    @property
    def view_keys(self) -> dict[str, tuple[str, ...]]:
        """Feature table with history to its entity keys."""
        return {t.name: t.entity_keys for t in self.features.feature_tables if not t.static}


def read_pipeline_config(repo: Path) -> PipelineConfig:
    """The use case that a feature repository describes, with all that follows from its columns.

    Raises:
        ConfigurationError: the file is missing, is no YAML, or says something that cannot be; or a
            query is missing or wrong, of which columns are to be read.
    """
    absent = f"{no_project(repo)}. Nothing was run"
    content = read_yaml(repo / USE_CASE_FILE, USE_CASE_FILE, absent)
    config = checked(PipelineConfig, content, USE_CASE_FILE, "Nothing was run")
    from tasks.features.declared.columns import completed

    return config.model_copy(update={"features": completed(config.features, config.name, repo)})


def check_repository(config: PipelineConfig, repo: Path) -> None:
    """See that the files which a use case names are there and can be read, before any of it runs.

    Raises:
        ConfigurationError: a query is missing or no text, a suite is wrong, or the definitions are
            no Python.
    """
    features = config.features
    files = [features.training_set.sql, *(query.sql for query in features.staging)]
    files += [table.sql for table in features.feature_tables]
    if missing := [file for file in files if file and not (repo / file).is_file()]:
        raise ConfigurationError(
            f"the feature repository has no file {', '.join(missing)}, which {USE_CASE_FILE} "
            "names; write it, or change the name there. Nothing was run"
        )
    read_texts(config, repo)
    for file in sorted(file for file in repo.glob("*.py") if file.is_file()):
        try:
            compile(file.read_bytes(), file.name, "exec")
        except SyntaxError as exc:
            where = f"{file.name}, line {exc.lineno}" if exc.lineno else file.name
            raise ConfigurationError(f"{where}: {exc.msg}. Nothing was run") from exc
    suites_of(config, repo)


@dataclass(frozen=True)
class QueryTexts:
    """SQL of a use case, as it runs: of each feature table, each staging table, and the frame."""

    tables: dict[str, str]
    staging: dict[str, str]
    frame: str


def read_texts(config: PipelineConfig, repo: Path) -> QueryTexts:
    """The SQL of a use case, read or compiled.

    Raises:
        ConfigurationError: a file is missing or no text.
    """
    from tasks.features.declared.queries import frame_query, read_query, table_query

    features = config.features
    return QueryTexts(
        tables={t.name: table_query(repo, t, features) for t in features.feature_tables},
        staging={query.name: read_query(repo, query.sql) for query in features.staging},
        frame=frame_query(repo, features),
    )


@dataclass(frozen=True)
class Suites:
    """The suites of a use case: by raw table, by feature table, and that of the training set."""

    rows: dict[str, Suite]
    tables: dict[str, Suite]
    training_set: Suite


def suites_of(config: PipelineConfig, repo: Path) -> Suites:
    """The suites of a use case; those that are called as by default and have no file are derived.

    Raises:
        ConfigurationError: a suite is wrong, or has no file and a name of its own.
    """
    from tasks.features.declared.columns import table_shapes
    from tasks.validation.derived import base_suite

    features = config.features
    names = {f"raw_{table.name}": table.suite for table in features.raw_tables}
    names |= {f"feature_{table.name}": table.suite for table in features.feature_tables}
    names["training_set"] = features.training_set.suite
    absent = [name for name, own in names.items() if name == own and not has_suite(repo, name)]
    shapes = table_shapes(features, repo) if absent else {}
    found = {
        name: read_suite(repo, own, base_suite(name, shapes[name]) if name in absent else None)
        for name, own in names.items()
    }
    return Suites(
        rows={t.name: found[f"raw_{t.name}"] for t in features.raw_tables},
        tables={t.name: found[f"feature_{t.name}"] for t in features.feature_tables},
        training_set=found["training_set"],
    )


def approved_suites(config: PipelineConfig, settings: Settings) -> Suites:
    """The suites of a use case, for a run: bands that were approved are as they were then.

    Raises:
        ConfigurationError: as `suites_of`.
        SignatureError: bands were changed since, or signed by nobody who is trusted.
    """
    suites = suites_of(config, settings.feature_repo)
    for suite in (*suites.rows.values(), *suites.tables.values(), suites.training_set):
        check_baseline(settings, config.name, suite.suite)
    return suites


class ImportConfig(Described):
    """One model that was trained elsewhere: its files, its texts, its name, its conversion."""

    encoder: EncoderConfig | None = Field(default=None, description="Files of a text encoder.")
    corpus: CorpusConfig | None = Field(default=None, description="Texts for the encoder.")
    program: ProgramConfig | None = Field(default=None, description="A program that is ready.")
    rows: RowsConfig | None = Field(default=None, description="Rows that are ready.")
    registry: RegistryConfig = Field(description="Name that the model is registered under.")
    conversion: ConversionConfig = ConversionConfig()
    """What it is converted into, and when that is kept."""

    @model_validator(mode="after")
    def _one_model_and_its_rows(self) -> Self:
        if (self.encoder is None) == (self.program is None):
            raise ValueError("an import has either an encoder or a program; name one of them")
        if (self.corpus is None) == (self.rows is None):
            raise ValueError("an import has either a corpus or rows; name one of them")
        if self.corpus is not None and self.encoder is None:
            raise ValueError("a corpus is read with an encoder's tokenizer; give a program rows")
        return self


def read_import_config(file: Path) -> ImportConfig:
    """The import that a file describes.

    Raises:
        ConfigurationError: the file is missing, is no YAML, or says something that cannot be.
    """
    absent = f"{file} does not exist; name the file of an import"
    content = read_yaml(file, file.name, absent)
    return checked(ImportConfig, content, file.name, "Nothing was run")
