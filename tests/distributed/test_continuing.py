"""A training that begins with an earlier model's weights."""

import re
from pathlib import Path

import pytest

from tasks.contracts.training import TrainedModel
from tests.support.data.builders import COLUMNS, frame, month, splits
from tests.support.ranks.runs import NUM_ROWS, config, log_of, on_ranks, start_of, train

pytestmark = pytest.mark.slow

ONE_RANK = on_ranks(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("continuing")


@pytest.fixture(scope="module")
def champion(folder: Path) -> TrainedModel:
    """Trained on January to March."""
    early = splits().model_copy(update={"train": month(1, 3), "validation": month(4, 2)})
    return train(folder, config(**ONE_RANK), windows=early)


def test_a_warm_start_takes_over_what_means_the_same_and_begins_better(
    folder: Path, champion: TrainedModel
) -> None:
    settings = config(**ONE_RANK, start="champion", learning_rate=1e-4, max_epochs=1)
    warm = train(folder, settings, initial=start_of(champion))
    assert warm.started_from == start_of(champion)
    assert "took over the champion's weights" in log_of(warm, folder)
    cold = train(folder, config(**ONE_RANK, learning_rate=1e-4, max_epochs=1))
    assert cold.started_from is None
    assert warm.epochs[0].validation_auc > cold.epochs[0].validation_auc + 0.05


def test_a_continued_training_sees_new_rows_and_some_older_ones(
    folder: Path, champion: TrainedModel
) -> None:
    settings = config(**ONE_RANK, start="champion", replay_share=0.2, max_epochs=1)
    log = log_of(train(folder, settings, initial=start_of(champion)), folder)
    times = frame(NUM_ROWS)[COLUMNS.event_time]
    num_new = int(((times >= month(4).start) & (times < month(7).start)).sum())
    assert num_new < int(re.search(r"holds (\d+) of (\d+) training rows", log)[2]) < 1.5 * num_new
