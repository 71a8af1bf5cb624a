"""What one run of the loop is asked to do: one value, read from the feature repository."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import AliasChoices, Field, ValidationError, model_validator

from tasks.contracts.base import Contract, TimeWindow
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
from tasks.imports.config import CorpusConfig, EncoderConfig, ProgramConfig, RowsConfig
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import USE_CASE_FILE, USE_CASE_NAME
from tasks.registry.config import PromotionConfig, RegistryConfig
from tasks.release.config import ReleaseConfig
from tasks.training.compression.config import CompressionConfig
from tasks.training.config import TrainingConfig, model_trained
from tasks.training.search.config import SearchConfig, check_space
from tasks.validation.suites import read_suites


class PipelineConfig(Contract):
    """One use case: its data, its windows, and how each stage is to be done."""

    name: str = Field(pattern=USE_CASE_NAME, max_length=60, description="Use case.")
    question: str = Field(min_length=1, description="What the model answers, for people.")
    window: TimeWindow = Field(description="Window that is refreshed and retrieved.")
    splits: DataSplits = Field(description="Windows for training, validation and test.")
    current: TimeWindow = Field(description="Window that the drift check looks at.")
    clock: ClockConfig = ClockConfig()
    features: FeatureConfig
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
    def _search_is_of_the_training(self) -> Self:
        check_space(self.training, self.search)
        return self

    def with_splits(self, splits: DataSplits) -> PipelineConfig:
        """The use case with these splits, on rows up to the end of the last of them."""
        start = min(self.window.start, splits.train.start)
        window = TimeWindow(start=start, end=splits.test.end)
        return self.model_copy(update={"window": window, "splits": splits})

    @property
    def feature_queries(self) -> dict[str, str]:
        """Feature table to the file of its query."""
        return {table.name: table.sql for table in self.features.feature_tables}

    @property
    def staging_queries(self) -> dict[str, str]:
        """Staging table to the file of its query."""
        return {query.name: query.sql for query in self.features.staging}

    @property
    def view_keys(self) -> dict[str, tuple[str, ...]]:
        """Feature table with history to its entity keys."""
        return {t.name: t.entity_keys for t in self.features.feature_tables if not t.static}

    @property
    def row_suites(self) -> dict[str, str]:
        """Raw table to the suite that judges it."""
        return {table.name: table.suite for table in self.features.raw_tables}

    @property
    def table_suites(self) -> dict[str, str]:
        """Feature table to the suite that judges it."""
        return {table.name: table.suite for table in self.features.feature_tables}


def read_pipeline_config(repo: Path) -> PipelineConfig:
    """The use case that a feature repository describes.

    Raises:
        ConfigurationError: the file is missing, is no YAML, or says something that cannot be.
    """
    file = repo / USE_CASE_FILE
    try:
        return PipelineConfig.model_validate(read_yaml(file, USE_CASE_FILE))
    except FileNotFoundError as exc:
        raise ConfigurationError(
            f"{file} does not exist; name a feature repository with FALAJ_FEATURE_REPO"
        ) from exc
    except ValidationError as exc:
        raise ConfigurationError(f"{USE_CASE_FILE}: {faults(exc)}. Nothing was run") from exc


def check_repository(config: PipelineConfig, repo: Path) -> None:
    """See that the files which a use case names are there and can be read, before any of it runs.

    Raises:
        ConfigurationError: a query is missing or no text, a suite is missing or wrong, or the
            definitions are no Python.
    """
    from tasks.features.tables.build import read_query

    features = config.features
    queries = [*config.feature_queries.values(), *config.staging_queries.values()]
    queries.append(features.training_set.sql)
    if missing := [name for name in queries if not (repo / name).is_file()]:
        raise ConfigurationError(
            f"the feature repository has no file {', '.join(missing)}, which {USE_CASE_FILE} "
            "names; write it, or change the name there. Nothing was run"
        )
    for name in queries:
        read_query(repo, name)
    for file in sorted(file for file in repo.glob("*.py") if file.is_file()):
        try:
            compile(file.read_bytes(), file.name, "exec")
        except SyntaxError as exc:
            where = f"{file.name}, line {exc.lineno}" if exc.lineno else file.name
            raise ConfigurationError(f"{where}: {exc.msg}. Nothing was run") from exc
    named = [*config.row_suites.values(), *config.table_suites.values()]
    read_suites(repo, {name: name for name in (*named, features.training_set.suite)})


def faults(exc: ValidationError) -> str:
    """What a validation found, in one line: where, and what is wrong there.

    Each mistake is told once, with all its places. A list whose items are wrong is not told to be
    too short: pydantic counts only the right ones.
    """
    errors = exc.errors()
    places = [error["loc"] for error in errors]
    found: dict[str, list[str]] = {}
    for error in errors:
        place = error["loc"]
        inside = any(len(p) > len(place) and p[: len(place)] == place for p in places)
        if error["type"] != "too_short" or not inside:
            name = ".".join(map(str, place)).removesuffix(".[key]")
            found.setdefault(error["msg"].removeprefix("Value error, "), []).append(name or "it")
    return "; ".join(f"{', '.join(names)}: {message}" for message, names in found.items())


class ImportConfig(Contract):
    """One model that was trained elsewhere: its files, its texts, its name, its conversion."""

    encoder: EncoderConfig | None = Field(default=None, description="Files of a text encoder.")
    corpus: CorpusConfig | None = Field(default=None, description="Texts for the encoder.")
    program: ProgramConfig | None = Field(default=None, description="A program that is ready.")
    rows: RowsConfig | None = Field(default=None, description="Rows that are ready.")
    registry: RegistryConfig = Field(description="Name that the model is registered under.")
    conversion: ConversionConfig = Field(
        default=ConversionConfig(), description="What it is converted into, and when that is kept."
    )

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
    try:
        return ImportConfig.model_validate(read_yaml(file, file.name))
    except FileNotFoundError as exc:
        raise ConfigurationError(f"{file} does not exist; name the file of an import") from exc
    except ValidationError as exc:
        raise ConfigurationError(f"{file.name}: {faults(exc)}. Nothing was run") from exc
