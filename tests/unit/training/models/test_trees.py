import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from tasks.training.core.network import exported
from tasks.training.models import boosting
from tasks.training.models.trees import (
    LARGEST,
    BoostingProgram,
    CategoryValues,
    Tree,
    grouped,
    rounded_down,
)

NUM_FEATURES = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run beside each other: threads that wait for one another take each other's cores."""
    with threadpool_limits(1, user_api="openmp"):
        yield


def numbers(num_rows: int, seed: int = 0) -> np.ndarray:
    """Rows with ties, with missing values in two columns, the second of which has few values."""
    drawn = np.random.default_rng(seed)
    rows = drawn.normal(size=(num_rows, NUM_FEATURES)).astype(np.float32)
    rows[:, 1] = np.round(rows[:, 1])
    rows[drawn.random(rows.shape) < (0.0, 0.2, 0.1, 0.0)] = np.nan
    return rows


def labels(rows: np.ndarray) -> np.ndarray:
    known = np.nan_to_num(rows, nan=0.7)
    return (known[:, 0] * known[:, 1] + np.sin(3 * known[:, 2]) > 0.3).astype(float)


def answers(program: BoostingProgram, rows: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        none = torch.zeros(len(rows), 0, dtype=torch.int32)
        return program.outputs(none, torch.from_numpy(rows)).numpy()


@pytest.mark.parametrize("seed", [0, 1])
def test_trees_as_tensors_answer_as_scikit_learn_does_on_edge_rows_too(seed: int) -> None:
    rows = numbers(3000, seed)
    model = HistGradientBoostingClassifier(max_iter=70, min_samples_leaf=5, random_state=0)
    model.fit(rows, labels(rows))
    trees = [boosting._tree_of_nodes(of_class[0].nodes) for of_class in model._predictors]
    base = float(model._baseline_prediction[0, 0])
    program = BoostingProgram([], grouped(trees, NUM_FEATURES), base, None)
    # Exactly on the thresholds, as near as 32 bits get to them, and where numbers end.
    edges = np.repeat(numbers(1, 7), 3 * 400, axis=0)
    nodes = [(t.feature[n], t.threshold[n]) for t in trees for n in t.questions][:400]
    for place, (feature, threshold) in enumerate(nodes):
        near = np.float32(threshold)
        edges[3 * place : 3 * place + 3, feature] = (
            near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf)),
        )  # fmt: skip
    ends = np.full((4, NUM_FEATURES), [[np.nan], [np.inf], [-np.inf], [1e30]], dtype=np.float32)
    for some in (numbers(2000, 5), edges, ends):
        np.testing.assert_allclose(answers(program, some), model.decision_function(some), atol=1e-5)


@pytest.mark.parametrize("library", ["sklearn", "lightgbm"])
def test_trees_of_several_classes_answer_as_their_library_does(library: str) -> None:
    rows, unseen = numbers(2000), numbers(1000, 5)
    known = np.digitize(np.nan_to_num(rows[:, 0] + rows[:, 2]), [-0.6, 0.4])
    if library == "sklearn":
        model = HistGradientBoostingClassifier(max_iter=9, random_state=0).fit(rows, known)
        trees = [boosting._tree_of_nodes(tree.nodes) for step in model._predictors for tree in step]
        base, expected = np.ravel(model._baseline_prediction), model.predict_proba(unseen)
    else:
        lightgbm = pytest.importorskip("lightgbm", reason="the extra falaj[boosting]")
        settings = {"objective": "multiclass", "num_class": 3, "verbosity": -1}
        model = lightgbm.train(settings, lightgbm.Dataset(rows, known), 9)
        told = model.dump_model()["tree_info"]
        trees = [boosting._tree_of_json(tree["tree_structure"]) for tree in told]
        base, expected = np.zeros(3), model.predict(unseen)
    program = BoostingProgram([], grouped(trees, NUM_FEATURES, 3), base, None)
    none = torch.zeros(len(unseen), 0, dtype=torch.int32)
    with torch.inference_mode():
        seen = BoostingProgram.of_state(program.state())(none, torch.from_numpy(unseen)).numpy()
    np.testing.assert_allclose(seen, expected, atol=1e-5)


def test_trees_of_lightgbm_answer_as_it_does() -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="the extra falaj[boosting]")
    rows = numbers(3000)
    settings = {"objective": "binary", "verbosity": -1, "min_data_in_leaf": 5}
    model = lightgbm.train(settings, lightgbm.Dataset(rows, labels(rows)), 40)
    described = model.dump_model()["tree_info"]
    trees = [boosting._tree_of_json(tree["tree_structure"]) for tree in described]
    program = BoostingProgram([], grouped(trees, NUM_FEATURES), 0.0, None)
    unseen = numbers(2000, 5)
    unseen[::7, 0] = np.nan  # no training row lacked it
    expected = model.predict(unseen, raw_score=True)
    np.testing.assert_allclose(answers(program, unseen), expected, atol=1e-5)


def test_a_threshold_never_rises_when_it_is_rounded() -> None:
    given = np.array([0.1, 1 / 3, -0.1, 1e-50, 5.0, np.inf, 1e300])
    seen = rounded_down(given)
    assert (seen.astype(float) <= given).all()
    assert seen[5] == np.float32(LARGEST)
    assert np.isfinite(seen).all()
    # The next float is above: nothing lies between.
    assert (np.nextafter(seen[:5], np.float32(np.inf)).astype(float) > given[:5]).all()


def test_a_tree_without_a_question_and_an_unknown_category_have_answers(tmp_path: Path) -> None:
    leaf = Tree(
        *(np.zeros(1, dtype=kind) for kind in (np.int64, float, bool)),
        left=np.array([-1]), right=np.array([-1]), value=np.array([0.25]),
    )  # fmt: skip
    split = Tree(
        np.array([0, 0, 0]), np.array([0.5, 0, 0]), np.zeros(3, bool),
        left=np.array([1, -1, -1]), right=np.array([2, -1, -1]), value=np.array([0, -1.0, 1.0]),
    )  # fmt: skip
    known = CategoryValues(np.array([3, 9], np.int32), np.array([0.2, 0.9], np.float32), 0.4)
    program = BoostingProgram([known], grouped([leaf, split], 1), 0.0, None)
    again = BoostingProgram.of_state(program.state())
    file = tmp_path / "model.pt2"
    file.write_bytes(exported(again, 1, 0))
    module = torch.export.load(io.BytesIO(file.read_bytes())).module()
    scores = module(torch.tensor([[3], [9], [0], [77]], dtype=torch.int32), torch.zeros(4, 0))
    logits = np.array([0.25 - 1, 0.25 + 1, 0.25 - 1, 0.25 - 1])
    np.testing.assert_allclose(scores.numpy(), 1 / (1 + np.exp(-logits)), rtol=1e-6)
