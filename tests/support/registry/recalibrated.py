"""A real registry whose champion is a real program, and each stage of a release in it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.contracts.base import ModelVersionRef, TimeWindow
from tasks.contracts.data import DataSplits
from tasks.contracts.evaluation import EvaluationReport, FitOutcome
from tasks.contracts.release import CalibrationSource, PromotionDecision
from tasks.contracts.training import CandidateModel, RecalibratedModel
from tasks.conversion.calibrator import map_program
from tasks.evaluation.baseline_model import score_baseline_model
from tasks.evaluation.config import BaselineModelConfig, EvaluationConfig, RecalibrationConfig
from tasks.evaluation.judge import judge_model, score_window
from tasks.evaluation.recalibration import fit_scored
from tasks.registry.config import PromotionConfig
from tasks.registry.mlflow_registry import CHAMPION, RegisteredVersion, Registry
from tasks.registry.programs import find_calibration_source, find_incumbent
from tests.support.data.builders import dataset, frame, month
from tests.support.evaluation.programs import LateRate, stored_program, trained_model
from tests.support.registry.builders import CONFIG, World

NAME = CONFIG.model_name
TRAIN, FIT, HOLDOUT = month(1, 6), month(7, 3), month(10, 3)
SPLITS = DataSplits(train=TRAIN, validation=FIT, test=HOLDOUT)
JUDGING = EvaluationConfig(slices=("month",))
GATES = PromotionConfig(min_auc=0.55, max_calibration_error=0.5, baseline_model_margin=0.2)
RECALIBRATING = RecalibrationConfig(min_rows=200)


class Boastful(LateRate):
    """Ranks as well as `LateRate` and promises far too much."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return torch.sigmoid(2.5 * torch.logit(super().forward(categorical, numeric)) + 2.0)


@dataclass(frozen=True)
class Installation(World):
    """A registry, and what each stage of a release does in it."""

    def release(self, model: CandidateModel) -> tuple[EvaluationReport, PromotionDecision]:
        report = self.judge(model)
        ref = self.register_judged(model, report)
        return report, self.promote(ref, report, self.attach(ref), GATES)

    def judge(self, model: CandidateModel) -> EvaluationReport:
        rival = find_incumbent(model, CONFIG, self.location, self.store)
        baseline_model = score_baseline_model(
            self.dataset, SPLITS, BaselineModelConfig(max_iterations=20), self.store
        )
        return judge_model(model, self.dataset, rival, baseline_model, JUDGING, self.store)

    def source(self, fit: TimeWindow = FIT, holdout: TimeWindow = HOLDOUT) -> CalibrationSource:
        return find_calibration_source(fit, holdout, NAME, self.location, self.store)

    def fitted(self, source: CalibrationSource) -> FitOutcome:
        scored = score_window(source.program, self.dataset, FIT, JUDGING, self.store)
        return fit_scored(scored, source.program.columns, RECALIBRATING, self.store)

    def recalibrated(self) -> RecalibratedModel:
        source = self.source()
        outcome = self.fitted(source)
        assert outcome.fit is not None, outcome.refusal
        return map_program(source, outcome.fit, self.dataset, SPLITS, self.store)

    @property
    def champion(self) -> RegisteredVersion:
        return Registry(self.location).by_alias(NAME, CHAMPION)


@pytest.fixture
def installed(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    world = World.at(tmp_path)
    rows = dataset(world.store, frame(12_000))
    return Installation(world.location, world.store, rows).with_database_of(migrated)


def first(installed: Installation, network: LateRate) -> ModelVersionRef:
    """Make a network the champion."""
    trained = trained_model(stored_program(installed.store, network).program, installed.dataset)
    trained = trained.model_copy(update={"splits": SPLITS})
    _, decision = installed.release(trained)
    if not decision.promoted:  # as a person would who knows no better
        registry = Registry(installed.location)
        registry.set_alias(registry.confirmed(decision.candidate), CHAMPION)
    return decision.candidate
