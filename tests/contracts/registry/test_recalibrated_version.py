"""A champion whose scores are wrong, mapped anew: real programs, judgements, MLflow and gates."""

import pytest
from torch import Tensor

from tasks.conversion.calibrator import map_program
from tasks.evaluation.recalibration import why_no_gain
from tasks.kernel.errors import RegistryError
from tasks.registry.mlflow_registry import Registry
from tasks.registry.model_folder import read_version
from tests.support.data.builders import month
from tests.support.evaluation.programs import LateRate
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


def test_without_a_champion_there_is_nothing_to_map(installed: Installation) -> None:
    with pytest.raises(RegistryError, match="has no champion"):
        installed.source()
