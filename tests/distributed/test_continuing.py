"""A training that begins with an earlier model's weights."""

import re
from pathlib import Path

import pytest

from tasks.contracts.training import StartingPoint, TrainedModel
from tasks.kernel.settings import ArtifactStore
from tasks.training.config import TrainingConfig
from tasks.training.launch.launcher import launch_training
from tests.support.data.builders import COLUMNS, dataset, frame, month, splits
from tests.support.ranks.runs import NUM_ROWS, config, on_ranks, start_of, train

pytestmark = pytest.mark.slow

ONE_RANK = on_ranks(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("continuing")


@pytest.fixture(scope="module")
def champion(folder: Path) -> TrainedModel:
    """Trained on January to March."""
    store = ArtifactStore(folder / "store")
    early = splits().model_copy(update={"train": month(1, 3), "validation": month(4, 2)})
    small = dataset(store, frame(NUM_ROWS))
    return launch_training(small, early, config(**ONE_RANK), store, folder / "work")


def go_on(folder: Path, settings: TrainingConfig, start: StartingPoint) -> tuple[TrainedModel, str]:
    store = ArtifactStore(folder / "store")
    small = dataset(store, frame(NUM_ROWS))
    model = launch_training(small, splits(), settings, store, folder / "work", None, start)
    return model, store.path(model.log).read_text()


def test_a_warm_start_takes_over_what_means_the_same_and_begins_better(
    folder: Path, champion: TrainedModel
) -> None:
    settings = config(**ONE_RANK, start="champion", learning_rate=1e-4, max_epochs=1)
    warm, log = go_on(folder, settings, start_of(champion))
    assert warm.started_from == start_of(champion)
    assert "took over the champion's weights" in log
    cold = train(folder, config(**ONE_RANK, learning_rate=1e-4, max_epochs=1))
    assert cold.started_from is None
    assert warm.epochs[0].validation_auc > cold.epochs[0].validation_auc + 0.05


def test_a_continued_training_sees_new_rows_and_some_older_ones(
    folder: Path, champion: TrainedModel
) -> None:
    settings = config(**ONE_RANK, start="champion", replay_share=0.2, max_epochs=1)
    _, log = go_on(folder, settings, start_of(champion))
    rows = frame(NUM_ROWS)
    times = rows[COLUMNS.event_time]
    num_new = int(((times >= month(4).start) & (times < month(7).start)).sum())
    held = re.search(r"holds (\d+) of (\d+) training rows", log)
    assert num_new < int(held[2]) < 1.5 * num_new
