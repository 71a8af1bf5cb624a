"""A real champion whose scores promise far too much, and a controller's decision about it.

`python -m tests.support.control.miscalibrated <result id>` answers a result in this process, as
a platform without deployments does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flows.config import read_pipeline_config
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.evaluation import Calibrator, MapFit
from tasks.contracts.run import RunRecord
from tasks.conversion.calibrator import map_program
from tasks.evaluation.baseline_model import score_baseline_model
from tasks.evaluation.judge import judge_model
from tasks.kernel.settings import Settings
from tasks.registry.candidate import register_candidate
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import CHAMPION, Registry
from tasks.registry.programs import fetch_version, find_calibration_source

BAD = Calibrator(slope=0.4, intercept=1.2)


def spoil_champion(record: RunRecord, home: Path, repo: Path) -> ModelVersionRef:
    """Register the run's model with a map that makes its scores wrong, and let it be the champion.

    Args:
        record: of a run whose candidate was promoted.
        home: its state folder.
        repo: its feature repository.
    """
    settings = Settings.from_environment({"FALAJ_HOME": str(home), "FALAJ_FEATURE_REPO": str(repo)})
    config, store = read_pipeline_config(settings.feature_repo), settings.store
    location, splits = RegistryLocation.of(settings), record.model.splits
    name = config.registry.model_name
    source = find_calibration_source(splits.validation, splits.test, name, location, store)
    fit = MapFit(
        map=BAD, slope_error=0, intercept_error=0, window=splits.train, num_rows=1
    )  # fmt: skip
    model = map_program(source, fit, record.dataset, splits, store)
    baseline_model = score_baseline_model(record.dataset, splits, config.baseline_model, store)
    rival = fetch_version(record.version, location, store)
    evaluation = judge_model(model, record.dataset, rival, baseline_model, config.evaluation, store)
    ref = register_candidate(
        model, evaluation, record.dataset, config.registry, location, store, "spoilt"
    )
    registry = Registry(location)
    registry.set_alias(registry.confirmed(ref), CHAMPION)
    return ref


def answer_here(result_id: str) -> None:
    """Answer a result; what was decided is carried out in this process."""
    from flows import decision
    from flows.decision import decision_flow

    decision.deployment_for = lambda *_: None  # as where nothing is deployed
    decision_flow(result_id)


if __name__ == "__main__":
    answer_here(sys.argv[1])
