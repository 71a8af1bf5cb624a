"""Smaller networks in a real registry: whose child a version is, and what is made smaller next."""

import pytest

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.release import CompressionParent
from tasks.contracts.training import CompressedModel, ModelCompression
from tasks.kernel.errors import RegistryError
from tasks.registry.candidate import register_candidate
from tasks.registry.mlflow_registry import CHAMPION, Registry
from tasks.registry.model_folder import read_version
from tasks.registry.programs import find_compression_parent
from tests.support.evaluation.programs import LateRate, stored_program, trained_model
from tests.support.registry.builders import CONFIG
from tests.support.registry.recalibrated import (
    NAME,
    SPLITS,
    Boastful,
    Installation,
    first,
    installed,
)

pytestmark = pytest.mark.slow

__all__ = ["installed"]  # a fixture


def found(installed: Installation, version: int | None = None) -> CompressionParent:
    return find_compression_parent(version, NAME, installed.location, installed.store)


def compressed(installed: Installation, parent: ModelVersionRef) -> ModelVersionRef:
    """Make a smaller network of `parent` the champion."""
    store, rows = installed.store, installed.dataset
    trained = trained_model(stored_program(store, Boastful()).program, rows)
    compression = ModelCompression(
        parent=parent,
        method="distillation",
        settings={"hidden_sizes": [8]},
        parent_sizes=(32,),
        parent_parameters=5_000,
        is_distilled=True,
    )
    content = {**trained.model_dump(), "splits": SPLITS, "compression": compression.model_dump()}
    model = CompressedModel.model_validate(content)
    report = installed.judge(model)
    ref = register_candidate(model, report, rows, CONFIG, installed.location, store, "abc1234")
    registry = Registry(installed.location)
    version = registry.confirmed(ref)
    registry.set_alias(version, CHAMPION)
    manifest = read_version(version).manifest
    assert manifest.compression == compression
    assert version.tags["compressed_from"] == str(parent.version)
    return ref


def test_a_champion_is_made_smaller_from_what_it_was_trained_on(installed: Installation) -> None:
    large = first(installed, LateRate())
    parent = found(installed)
    assert parent.program.version == large
    assert parent.splits == SPLITS
    assert installed.store.holds(parent.checkpoint)
    assert found(installed) == parent


def test_of_a_smaller_champion_the_large_one_is_made_smaller_again(installed: Installation) -> None:
    large = first(installed, LateRate())
    small = compressed(installed, large)
    assert found(installed).program.version == large
    assert found(installed, small.version).program.version == small  # whoever names it, means it


def test_a_new_map_of_its_scores_does_not_hide_where_a_network_comes_from(
    installed: Installation,
) -> None:
    large = first(installed, LateRate())
    compressed(installed, large)
    _, decision = installed.release(installed.recalibrated())
    assert installed.champion.ref == decision.candidate
    assert found(installed).program.version == large


def test_without_a_champion_there_is_nothing_to_make_smaller(installed: Installation) -> None:
    with pytest.raises(RegistryError, match="has no champion"):
        found(installed)
    with pytest.raises(RegistryError, match="version 7 is not in the registry"):
        found(installed, 7)
