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
from tests.support.ranks.runs import (
    NUM_ROWS,
    assert_no_kept_epoch_is_repeated,
    config,
    log_of,
    on_ranks,
    pid_of_rank,
    start_of,
    train,
)

pytestmark = pytest.mark.slow

ONE_RANK = on_ranks(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compression")


@pytest.fixture(scope="module")
def parent(folder: Path) -> CompressionParent:
    model = train(folder, config(**ONE_RANK))
    program = RegisteredProgram(
        version=start_of(model).version, program=model.program, columns=COLUMNS
    )
    return CompressionParent(
        program=program, checkpoint=model.checkpoint, splits=splits(), training_config=model.config
    )


@pytest.fixture(scope="module")
def answers(folder: Path, parent: CompressionParent) -> ScoredWindow:
    store = ArtifactStore(folder / "store")
    rows = dataset(store, frame(NUM_ROWS))
    return score_window(parent.program, rows, splits().train, EvaluationConfig(), store)


def test_a_killed_fine_tuning_with_a_teacher_goes_on_where_it_was(
    folder: Path, parent: CompressionParent, answers: ScoredWindow
) -> None:
    asked = CompressionConfig(method="pruning-distillation", pruned_share=0.5, max_epochs=6)
    store = ArtifactStore(folder / "store")
    plan = plan_student(parent, asked, config(**ONE_RANK), store)
    distillation = DistillationTargets(scores=answers, weight=0.5, temperature=2.0)

    def kill(metrics: EpochMetrics) -> None:
        if metrics.epoch == 1:
            os.kill(pid_of_rank(0, folder), signal.SIGKILL)

    learnt_from = {"initial": plan.initial, "distillation": distillation}
    with pytest.raises(TransientError, match="rank 0 was killed"):
        train(folder, plan.config, kill, **learnt_from)
    model = train(folder, plan.config, **learnt_from)
    assert_no_kept_epoch_is_repeated(log_of(model, folder))
    assert [metrics.epoch for metrics in model.epochs] == list(range(6))
