"""Smaller networks on real ranks: the same loop, with a teacher's outputs in its loss."""

import os
import signal
from pathlib import Path

import pytest

from tasks.contracts.evaluation import ScoredWindow
from tasks.contracts.release import CompressionParent, RegisteredProgram
from tasks.contracts.training import DistillationTargets, EpochMetrics
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.judge import score_window
from tasks.kernel.errors import TransientError
from tasks.kernel.settings import ArtifactStore
from tasks.training.compression.config import CompressionConfig
from tasks.training.compression.plan import plan_student
from tests.support.data.builders import COLUMNS, dataset, frame, splits
from tests.support.ranks import runs

pytestmark = pytest.mark.slow

ONE_RANK = runs.on_ranks(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compression")


@pytest.fixture(scope="module")
def parent(folder: Path) -> CompressionParent:
    model = runs.train(folder, runs.config(**ONE_RANK))
    program = RegisteredProgram(
        version=runs.start_of(model).version, program=model.program, columns=COLUMNS
    )
    return CompressionParent(
        program=program, checkpoint=model.checkpoint, splits=splits(), training_config=model.config
    )


@pytest.fixture(scope="module")
def answers(folder: Path, parent: CompressionParent) -> ScoredWindow:
    store = ArtifactStore(folder / "store")
    rows = dataset(store, frame(runs.NUM_ROWS))
    return score_window(parent.program, rows, splits().train, EvaluationConfig(), store)


def test_a_killed_fine_tuning_with_a_teacher_goes_on_where_it_was(
    folder: Path, parent: CompressionParent, answers: ScoredWindow
) -> None:
    asked = CompressionConfig(method="pruning-distillation", pruned_share=0.5, max_epochs=6)
    plan = plan_student(parent, asked, runs.config(**ONE_RANK), ArtifactStore(folder / "store"))
    distillation = DistillationTargets(scores=answers, weight=0.5, temperature=2.0)

    def kill(metrics: EpochMetrics) -> None:
        if metrics.epoch == 1:
            os.kill(runs.pid_of_rank(0, folder), signal.SIGKILL)

    learnt_from = {"initial": plan.initial, "distillation": distillation}
    with pytest.raises(TransientError, match="rank 0 was killed"):
        runs.train(folder, plan.config, kill, **learnt_from)
    model = runs.train(folder, plan.config, **learnt_from)
    runs.assert_no_kept_epoch_is_repeated(runs.log_of(model, folder))
    assert [metrics.epoch for metrics in model.epochs] == list(range(6))
