"""What several flows do with a candidate: its validated rows, and its way into the registry."""

from flows.config import PipelineConfig, read_texts, suites_of
from tasks.contracts.base import ModelVersionRef, TimeWindow
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.training import CandidateModel
from tasks.features.task import build_training_set
from tasks.kernel.provenance import code_commit
from tasks.kernel.settings import Settings
from tasks.lineage.task import record_version
from tasks.registry.task import register_candidate
from tasks.validation.task import validate_training_set


def validated_rows(
    config: PipelineConfig, window: TimeWindow | None = None, splits: DataSplits | None = None
) -> ValidatedDataset:
    """The training set of a window, by default the use case's, after its validation."""
    suite = suites_of(config, Settings.from_environment().feature_repo).training_set
    snapshot = build_training_set(window or config.window, config.features)
    return validate_training_set(snapshot, suite, splits)


def register(
    model: CandidateModel,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    config: PipelineConfig,
) -> ModelVersionRef:
    """Register a judged model as the candidate, and record its lineage."""
    commit = code_commit()
    version = register_candidate(model, evaluation, dataset, config.registry, commit)
    texts = read_texts(config, Settings.from_environment().feature_repo)
    sql = texts.frame, texts.staging
    record_version(version, model, dataset, evaluation, *sql, commit, return_state=True)
    return version
