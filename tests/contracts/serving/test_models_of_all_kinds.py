"""From rows to answers of the serving engine, for each model that a training can make."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from serving.protocol.messages import model_metadata
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.training import TrainedModel
from tasks.kernel.settings import ArtifactStore
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.models.making import make_model
from tests.support.conversion.cases import threads_as_before
from tests.support.data.builders import CLASSES, COLUMNS, class_frame, dataset, frame, splits
from tests.support.ranks.runs import config, on_ranks
from tests.support.serving.served import FLIGHTS, ServedHome, ask, flight_rows, scores, serving
from tests.support.training.boosted import SMALL
from tests.support.training.own_module import WIDE

__all__ = ["threads_as_before"]  # a fixture

pytestmark = pytest.mark.anyio
OF_LABELS = 0.62
"""AUC that a model of these rows has at least; their labels are drawn, so none has much more."""


def trained(
    model: str, folder: Path, store: ArtifactStore, data: ValidatedDataset | None = None
) -> TrainedModel:
    """A model of the small rows, or of others; modules of the user's lie in `folder`."""
    (folder / "my_wide_model.py").write_text(WIDE)
    asked = config(**on_ranks(1), model=model, boosting=SMALL, max_epochs=3, learning_rate=0.02)
    data = data or dataset(store, frame())
    request = TrainingRequest(data, splits(), asked, project=folder)
    return make_model(request, store, folder / "work")


@pytest.mark.parametrize(
    "model",
    ["gradient-boosting", "my_wide_model:build", pytest.param("average", marks=pytest.mark.slow)],
)
async def test_rows_become_a_model_whose_variants_the_engine_answers_with(
    tmp_path: Path, model: str
) -> None:
    world = ServedHome.at(tmp_path / "home")
    made = trained(model, tmp_path, world.store)
    assert made.kind == model
    assert made.epochs[made.best_epoch].quality > OF_LABELS
    version = world.add_table(world.store.path(made.program).read_bytes())
    variants = world.convert(version)
    assert [one.name for one in variants] == ["onnx-fp32", "openvino-fp32"]
    world.promote(version)
    async with serving(world) as engine:
        rows = flight_rows(600)
        answer = await ask(engine, FLIGHTS, rows)
        assert answer.served.variant == "onnx-fp32"
        np.testing.assert_allclose(scores(answer), world.expected(version, rows), atol=1e-5)
        one = await ask(engine, FLIGHTS, rows.block(3, 4))
        np.testing.assert_allclose(scores(one), scores(answer)[3:4], atol=1e-6)
    labels = frame(600, seed=5)[COLUMNS.label]
    assert roc_auc_score(labels, scores(answer)) > OF_LABELS


@pytest.mark.parametrize("model", ["network", pytest.param("average", marks=pytest.mark.slow)])
async def test_a_model_of_several_classes_answers_with_a_probability_of_each(
    tmp_path: Path, model: str
) -> None:
    world = ServedHome.at(tmp_path / "home")
    made = trained(model, tmp_path, world.store, dataset(world.store, class_frame(), CLASSES))
    assert made.epochs[made.best_epoch].quality > OF_LABELS
    version = world.add_table(world.store.path(made.program).read_bytes(), columns=CLASSES)
    variants = world.convert(version)
    assert [one.name for one in variants] == ["onnx-fp32", "openvino-fp32"]
    world.promote(version)
    async with serving(world) as engine:
        rows = flight_rows(300)
        answers = scores(await ask(engine, FLIGHTS, rows))
        told = model_metadata(engine, FLIGHTS)
    np.testing.assert_allclose(answers, world.expected(version, rows), atol=1e-5)
    assert answers.shape == (300, 3)
    np.testing.assert_allclose(answers.sum(axis=1), 1, atol=1e-5)
    assert told["outputs"][0]["shape"] == [-1, 3]
    assert told["properties"] == {"classes": '["early","on time","late"]'}
