"""Versions made from others: recalibrated champions and smaller networks, judged and released."""

import pytest
from torch import Tensor

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.release import CompressionParent
from tasks.conversion.calibrator import map_program
from tasks.evaluation.recalibration import why_no_gain
from tasks.kernel.errors import RegistryError
from tasks.registry.mlflow_registry import CHAMPION, Registry
from tasks.registry.model_folder import read_version
from tasks.registry.programs import find_compression_parent
from tests.support.data.builders import compressed_model, compression, month
from tests.support.evaluation.programs import LateRate, stored_program, trained_model
from tests.support.registry.recalibrated import (
    HOLDOUT,
    NAME,
    SPLITS,
    Boastful,
    Installation,
    first,
    installed,
)

pytestmark = pytest.mark.slow

__all__ = ["installed"]  # a fixture


# A champion whose scores are wrong, mapped anew


class Backwards(LateRate):
    """Ranks the wrong way round."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return 1 - super().forward(categorical, numeric)


def test_a_champion_that_promises_too_much_is_mapped_judged_and_replaced(
    installed: Installation,
) -> None:
    boastful = first(installed, Boastful())
    model = installed.recalibrated()
    fit = model.calibration.fit
    assert fit.map.slope == pytest.approx(1 / 2.5, abs=4 * fit.slope_error)
    report, decision = installed.release(model)
    assert why_no_gain(report, boastful.version) is None
    assert decision.promoted, decision.gates
    assert decision.previous_champion == boastful.version
    manifest = read_version(installed.champion).manifest
    assert manifest.calibration == model.calibration
    assert manifest.calibration.source == boastful
    assert installed.champion.tags["recalibrated_from"] == str(boastful.version)

    # The same recalibration again finds the version that it made, and makes no other.
    assert installed.source().program.version == boastful
    assert installed.recalibrated() == model
    installed.release(model)
    assert len(Registry(installed.location).versions(NAME)) == 2

    # Another window goes on from the new champion, whose scores need no further map.
    later = installed.source(month(7, 2), HOLDOUT)
    assert later.program.version == decision.candidate
    assert later.calibration == model.calibration
    outcome = installed.fitted(later)
    again = map_program(later, outcome.fit, installed.dataset, SPLITS, installed.store)
    assert again.calibration.whole_map == outcome.fit.map.after(model.calibration.whole_map)
    refusal = why_no_gain(installed.judge(again), decision.candidate.version)
    assert "does not help beyond doubt" in refusal


def test_a_champion_that_ranks_backwards_is_left_for_a_retraining(installed: Installation) -> None:
    first(installed, Backwards())
    outcome = installed.fitted(installed.source())
    assert outcome.fit is None
    assert "no map mends a ranking. Retrain instead" in str(outcome.refusal)


# Smaller networks: whose child a version is, and what is made smaller next


def found(installed: Installation, version: int | None = None) -> CompressionParent:
    return find_compression_parent(version, NAME, installed.location, installed.store)


def compressed(installed: Installation, parent: ModelVersionRef) -> ModelVersionRef:
    """Make a smaller network of `parent` the champion."""
    trained = trained_model(stored_program(installed.store, Boastful()).program, installed.dataset)
    made = compression(parent)
    model = compressed_model(trained.model_copy(update={"splits": SPLITS}), made)
    ref = installed.register_judged(model, installed.judge(model))
    registry = Registry(installed.location)
    version = registry.confirmed(ref)
    registry.set_alias(version, CHAMPION)
    manifest = read_version(version).manifest
    assert manifest.compression == made
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


def test_without_a_champion_there_is_nothing_to_map_or_to_make_smaller(
    installed: Installation,
) -> None:
    for find in (installed.source, lambda: found(installed)):
        with pytest.raises(RegistryError, match="has no champion"):
            find()
    with pytest.raises(RegistryError, match="version 7 is not in the registry"):
        found(installed, 7)
