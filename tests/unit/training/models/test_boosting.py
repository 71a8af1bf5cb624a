import logging
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tasks.contracts.data import DatasetSchema
from tasks.contracts.training import TrainedModel
from tasks.evaluation.scoring import SCORE, Program, score_rows
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.models import boosting, making
from tests.support.data.builders import CLASSES, COLUMNS, class_frame, dataset, frame, splits
from tests.support.training.boosted import boosting_config

HOURS = COLUMNS.model_copy(update={"task": "regression", "label": "delay", "unit": "minutes"})


def request(store: ArtifactStore, columns: DatasetSchema = COLUMNS, **asked: object):
    rows = frame(3000)
    rows["delay"] = 40 * rows["late_rate_24h"] + (rows["carrier"] == "EV") * 9 + rows["is_late"]
    return TrainingRequest(dataset(store, rows, columns), splits(), boosting_config(**asked))


def validated(model: TrainedModel, asked: TrainingRequest, store: ArtifactStore) -> np.ndarray:
    """Scores of the validation rows by the published program."""
    program = Program.open(model.program, model.columns, store)
    keep = (model.columns.row_id, model.columns.label)
    rows = score_rows(program, asked.dataset, asked.splits.validation, keep, store)
    return rows[[model.columns.label, SCORE]].to_numpy(float).T


def test_trees_are_a_model_like_any_other_and_are_grown_once(
    store: ArtifactStore, tmp_path: Path
) -> None:
    asked, seen = request(store), []
    model = making.make_model(asked, store, tmp_path, seen.append)
    assert (model.kind, model.num_ranks, tuple(seen)) == ("gradient-boosting", 1, model.epochs)
    best = model.epochs[model.best_epoch]
    assert best.quality == max(epoch.quality for epoch in model.epochs) > 0.6
    labels, scores = validated(model, asked, store)
    assert (
        np.sign(scores[labels == 1][:, None] - scores[labels == 0]) / 2 + 0.5
    ).mean() == pytest.approx(best.quality, abs=1e-4)
    assert "step 0 (of 10 trees): train loss" in store.path(model.log).read_text()

    built = store.num_builds
    assert (making.make_model(asked, store, tmp_path), store.num_builds) == (model, built)
    # What only a network uses makes no other trees.
    other = asked.config.model_copy(update={"dropout": 0.1})
    same = making.make_model(replace(asked, config=other), store, tmp_path)
    assert (same.program, same.config["dropout"], store.num_builds) == (model.program, 0.1, built)
    # The same rows, settings and seed give the same bytes, on any number of cores.
    elsewhere = ArtifactStore(tmp_path / "elsewhere")
    copied = making.make_model(request(elsewhere, threads=2), elsewhere, tmp_path)
    assert copied.program.sha256 == model.program.sha256


@pytest.mark.parametrize("library", ["sklearn", "lightgbm"])
def test_a_regression_is_learnt_in_its_own_unit(
    store: ArtifactStore, tmp_path: Path, library: str
) -> None:
    if library == "lightgbm":
        pytest.importorskip("lightgbm", reason="the extra falaj[boosting]")
    asked = request(store, HOURS, library=library)
    model = making.make_model(asked, store, tmp_path)
    labels, scores = validated(model, asked, store)
    r2 = 1 - ((labels - scores) ** 2).sum() / ((labels - labels.mean()) ** 2).sum()
    assert r2 == pytest.approx(model.epochs[model.best_epoch].validation_r2, abs=1e-4)
    assert r2 > 0.9


@pytest.mark.parametrize("library", ["sklearn", "lightgbm"])
def test_several_classes_have_a_tree_each_in_turn(
    store: ArtifactStore, tmp_path: Path, library: str
) -> None:
    if library == "lightgbm":
        pytest.importorskip("lightgbm", reason="the extra falaj[boosting]")
    asked = TrainingRequest(
        dataset(store, class_frame(), CLASSES), splits(), boosting_config(library=library)
    )
    model = making.make_model(asked, store, tmp_path)
    program = Program.open(model.program, model.columns, store)
    rows = score_rows(program, asked.dataset, splits().validation, (CLASSES.label,), store)
    scores = rows[[*CLASSES.score_columns(SCORE)]].to_numpy()
    macro = roc_auc_score(rows[CLASSES.label], scores, multi_class="ovr")
    assert macro == pytest.approx(model.epochs[model.best_epoch].quality, abs=1e-3)
    assert macro > 0.68
    rarest = rows[CLASSES.label].value_counts().idxmin()
    assert np.array(CLASSES.classes)[scores.argmax(1)].tolist() == rows["predicted"].tolist()
    assert 0 < (scores.argmax(1) == rarest).mean() < 0.5


def test_more_rows_than_are_held_in_memory_are_sampled(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(store, max_rows=1000)
    path = store.path(asked.dataset.snapshot.data)
    with caplog.at_level(logging.WARNING):
        rows, facts = boosting.read_rows(asked, path, asked.splits.train)
    assert f"1000 of {facts.num_rows} rows" in caplog.text
    assert (len(rows.labels), facts.num_rows > 1000) == (1000, True)
    again, _ = boosting.read_rows(asked, path, asked.splits.train)
    np.testing.assert_array_equal(rows.numbers, again.numbers)


def test_rows_whose_labels_are_alike_are_refused(store: ArtifactStore, tmp_path: Path) -> None:
    rows = frame(3000)
    rows["is_late"] = np.int8(0)
    asked = TrainingRequest(dataset(store, rows), splits(), boosting_config())
    with pytest.raises(DataContractError, match="expected at least 5 rows of each label"):
        making.make_model(asked, store, tmp_path)


def test_a_library_that_is_not_installed_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"falaj\[boosting\]"):
        boosting.check_library(boosting_config(library="lightgbm").boosting)


@pytest.mark.slow
def test_trees_need_no_horovod(tmp_path: Path) -> None:
    program = """
        import sys
        sys.modules["horovod"] = None  # as where it is not installed
        from pathlib import Path
        from tasks.kernel.settings import ArtifactStore
        from tests.support.training.boosted import boosted
        folder = Path(sys.argv[1])
        print(boosted(ArtifactStore(folder), folder).num_ranks)
    """
    line = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(line, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
