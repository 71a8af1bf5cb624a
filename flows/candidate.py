"""What several flows do with a candidate: its validated rows, and its way into the registry."""

from flows.config import PipelineConfig, approved_suites, read_texts
from tasks.contracts.base import ModelVersionRef, TimeWindow
from tasks.contracts.data import DataSplits, FeatureSnapshot, FeatureTables, ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport, FeatureRanking
from tasks.contracts.training import CandidateModel
from tasks.evaluation.task import fit_baseline_model, judge_candidate
from tasks.features.task import build_training_set
from tasks.imports.task import encode_columns
from tasks.kernel.provenance import code_commit
from tasks.kernel.settings import Settings
from tasks.lineage.task import record_version
from tasks.registry.task import find_incumbent, register_candidate
from tasks.reporting.page import draw_quality
from tasks.validation.suites import Suite
from tasks.validation.task import validate_training_set


def validated_rows(
    config: PipelineConfig, window: TimeWindow | None = None, splits: DataSplits | None = None
) -> ValidatedDataset:
    """The training set of a window, by default the use case's, after its validation."""
    suite = approved_suites(config, Settings.from_environment()).training_set
    snapshot = training_set(config, window or config.window)
    return validate_training_set(snapshot, with_encoded(suite, snapshot), splits)


def with_encoded(suite: Suite, snapshot: FeatureSnapshot) -> Suite:
    """The suite of a training set, which need not name the numbers of encoded columns."""
    made = [name for encoder in snapshot.columns.encoders for name in encoder.numbers]
    if not made:
        return suite
    numbers = (*suite.columns.get("number", ()), *(n for n in made if not suite.kind_of(n)))
    return suite.model_copy(update={"columns": {**suite.columns, "number": numbers}})


def training_set(
    config: PipelineConfig, window: TimeWindow, tables: FeatureTables | None = None
) -> FeatureSnapshot:
    """The training set of a window, with the numbers of its encoded columns."""
    snapshot = build_training_set(window, config.features, tables)
    encoded = config.features.training_set.encoded
    return encode_columns(snapshot, encoded) if encoded else snapshot


def judge(
    model: CandidateModel,
    dataset: ValidatedDataset,
    config: PipelineConfig,
    ranking: FeatureRanking | None = None,
) -> EvaluationReport:
    """Judge a model beside the champion and the baseline model."""
    baseline_model = fit_baseline_model(dataset, config.splits, config.baseline_model)
    incumbent = find_incumbent(model, config.registry)
    return judge_candidate(model, dataset, incumbent, baseline_model, config.evaluation, ranking)


def register(
    model: CandidateModel,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    config: PipelineConfig,
) -> ModelVersionRef:
    """Register a judged model as the candidate, and record its lineage."""
    commit = code_commit()
    judged = evaluation, dataset, config.registry, commit
    version = register_candidate(model, *judged, draw_quality)
    texts = read_texts(config, Settings.from_environment().feature_repo)
    sql = texts.frame, texts.staging
    record_version(version, model, dataset, evaluation, *sql, commit, return_state=True)
    return version
