from __future__ import annotations

from dataclasses import dataclass

import pytest

from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import Yardstick
from tasks.contracts.release import RegisteredProgram
from tasks.contracts.training import TrainedModel
from tasks.evaluation.config import EvaluationConfig, YardstickConfig
from tasks.evaluation.yardstick import score_yardstick
from tasks.settings import ArtifactStore
from tests.support.data import builders
from tests.support.evaluation.programs import LateRate, stored_program, trained_model

QUICK = EvaluationConfig(
    slices=("carrier", "month"), min_slice_rows=100, min_slice_positives=20, replicates=100
)
QUICK_YARDSTICK = YardstickConfig(max_iterations=40, min_leaf_rows=20)


@dataclass(frozen=True)
class Case:
    """A candidate, a champion and a yardstick on one small snapshot."""

    store: ArtifactStore
    dataset: ValidatedDataset
    candidate: TrainedModel
    champion: RegisteredProgram
    yardstick: Yardstick


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    store = ArtifactStore(tmp_path_factory.mktemp("evaluation") / "artifacts")
    dataset = builders.dataset(store)
    return Case(
        store=store,
        dataset=dataset,
        candidate=trained_model(stored_program(store, LateRate()).program, dataset),
        champion=stored_program(store, LateRate(slope=-2.0)),
        yardstick=score_yardstick(dataset, builders.splits(), QUICK_YARDSTICK, store),
    )
