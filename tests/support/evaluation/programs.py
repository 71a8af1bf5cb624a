"""Tiny exported programs, good and bad, as training and the registry hand them over."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pandas as pd
import torch
from torch import Tensor, nn

from tasks.contracts.base import Artifact
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.contracts.evaluation import BaselineModel, EvaluationReport
from tasks.contracts.release import RegisteredProgram
from tasks.contracts.training import TrainedModel
from tasks.evaluation.baseline_model import score_baseline_model
from tasks.evaluation.config import BaselineModelConfig, EvaluationConfig
from tasks.evaluation.judge import judge_model
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key
from tests.support.conversion.programs import exported
from tests.support.data import builders
from tests.support.data.builders import COLUMNS, version_ref

QUICK = EvaluationConfig(slices=("carrier", "month"), min_slice_rows=100, min_slice_positives=20)
NUMBERS = COLUMNS.model_copy(update={"task": "regression", "unit": "minutes", "baseline": "temp"})
"""The columns, as if the label were a number."""


class LateRate(nn.Module):
    """Scores by the column that decides the label in `builders.frame`, times a slope."""

    def __init__(self, slope: float = 6.0) -> None:
        super().__init__()
        self.register_buffer("slope", torch.tensor(slope))

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        known = torch.nan_to_num(numeric) + categorical.float().sum(1, keepdim=True) * 0
        return torch.sigmoid(self.slope * (known[:, 2] - 0.25) + (known[:, 1] - 840) / 400 - 1.0)


class NotANumber(LateRate):
    """Forgets that numbers can be missing."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return super().forward(categorical, numeric) + numeric.sum(1) * 0


def stored_program(
    store: ArtifactStore, network: nn.Module, *, dynamic: bool = True
) -> RegisteredProgram:
    """The network, exported and registered as version 3."""

    def build(folder: StagedFolder) -> RegisteredProgram:
        (folder.path / "program.pt2").write_bytes(exported(network, dynamic=dynamic))
        artifact = folder.artifact("program.pt2")
        version = version_ref(artifact.sha256)
        return RegisteredProgram(version=version, program=artifact, columns=COLUMNS)

    values = [value.tolist() for value in network.state_dict().values()]
    key = content_key(type(network).__name__, values, dynamic)
    return store.build_once("programs", key, RegisteredProgram, build)


def trained_model(program: Artifact, dataset: ValidatedDataset) -> TrainedModel:
    """A training result with this program."""
    return builders.trained_model(program, dataset.snapshot.data.sha256)


def quick_baseline_model(store: ArtifactStore, dataset: ValidatedDataset) -> BaselineModel:
    """A baseline model of few trees."""
    config = BaselineModelConfig(max_iterations=40, min_leaf_rows=20)
    return score_baseline_model(dataset, builders.splits(), config, store)


@dataclass(frozen=True)
class Case:
    """A candidate, a champion and a baseline model on one small snapshot."""

    store: ArtifactStore
    dataset: ValidatedDataset
    candidate: TrainedModel
    champion: RegisteredProgram
    baseline_model: BaselineModel

    @classmethod
    def of(
        cls, folder: Path, rows: pd.DataFrame, columns: DatasetSchema, *networks: nn.Module
    ) -> Self:
        """Rows in a store of their own, and the networks of candidate and champion."""
        store = ArtifactStore(folder / "artifacts")
        dataset = builders.dataset(store, rows, columns)
        candidate, champion = (
            stored_program(store, network).model_copy(update={"columns": columns})
            for network in networks
        )
        trained = trained_model(candidate.program, dataset)
        return cls(
            store=store,
            dataset=dataset,
            candidate=trained.model_copy(update={"columns": columns}),
            champion=champion,
            baseline_model=quick_baseline_model(store, dataset),
        )

    def judged(self, config: EvaluationConfig = QUICK) -> EvaluationReport:
        """The candidate's judgement beside the others."""
        others = self.champion, self.baseline_model
        return judge_model(self.candidate, self.dataset, *others, config, self.store)
