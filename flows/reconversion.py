"""Convert again: a version that is registered already, with other targets, bounds or hardware."""

from __future__ import annotations

from prefect import flow
from pydantic import PositiveInt

from flows.config import PipelineConfig
from flows.conversion import conversion_flow
from flows.recalibration import with_splits
from flows.whereabouts import RECORDED
from tasks.contracts.release import ModelVariant
from tasks.features.task import build_training_set
from tasks.kernel.settings import Settings
from tasks.registry.task import find_trained
from tasks.validation.suites import read_suite
from tasks.validation.task import validate_training_set


@flow(
    name="reconversion",
    flow_run_name="reconvert-{config.registry.model_name}",
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def reconversion_flow(
    version: PositiveInt | None, config: PipelineConfig
) -> tuple[ModelVariant, ...]:
    """Build, judge and file variants of a registered version anew, for one class of hardware.

    They take the place of those that it has for that class.

    Its rows are those of its own training: the snapshot is taken from the store, or built again
    where it is gone. A model that was trained elsewhere is imported again instead.

    Args:
        version: number of the registered version; None for the champion, and before there is one
            for the candidate.
        config: the use case; its section `conversion` says what to make, and on what hardware.

    Raises:
        RegistryError: there is no such version, it is damaged, or was trained elsewhere.
    """
    trained = find_trained(config.registry, version)
    if trained.splits != config.splits:
        config = with_splits(config, trained.splits)
    suite = read_suite(Settings.from_environment().feature_repo, config.features.training_set.suite)
    snapshot = build_training_set(config.window, config.features)
    dataset = validate_training_set(snapshot, suite)
    return conversion_flow(trained.version, dataset, config)
