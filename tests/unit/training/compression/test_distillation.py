from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit, logit

from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import ScoredWindow
from tasks.contracts.training import DistillationTargets
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key
from tasks.training.config import TrainingConfig
from tasks.training.core.objective import Classification, Regression, labels_of
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.data.derived import write_distillation_targets
from tests.support.data.builders import COLUMNS, dataset, frame, splits
from tests.support.training.parents import SCALE
from tests.support.training.reading_ranks import job, opened


def scored(store: ArtifactStore, rows: pd.DataFrame, snapshot: str) -> ScoredWindow:
    """A teacher's scores of the training window: a number of each row that no other has."""
    train = splits().train
    inside = rows[rows[COLUMNS.event_time].between(train.start, train.end, inclusive="left")]
    scores = pd.DataFrame(
        {
            COLUMNS.row_id: inside[COLUMNS.row_id],
            "score": (0.1 + 0.8 * inside[COLUMNS.row_id] / len(rows)).astype(np.float32),
        }
    )

    def build(folder: StagedFolder) -> ScoredWindow:
        scores.to_parquet(folder.path / "scores.parquet", index=False)
        return ScoredWindow(
            program_sha256="0" * 64,
            snapshot_sha256=snapshot,
            window=train,
            num_rows=len(scores),
            scores=folder.artifact("scores.parquet"),
            metrics=None,
            excess_brier=None,
        )

    return store.build_once("scores", content_key(len(rows), snapshot), ScoredWindow, build)


def asked(data: ValidatedDataset, answers: DistillationTargets) -> TrainingRequest:
    return TrainingRequest(data, splits(), TrainingConfig(), distillation=answers)


def targets(answers: ScoredWindow) -> DistillationTargets:
    return DistillationTargets(scores=answers, weight=0.5, temperature=2.0)


def of_weight(weight: float, temperature: float) -> DistillationTargets:
    return DistillationTargets.model_construct(weight=weight, temperature=temperature)


def expected_logit(ids: pd.Series, num_rows: int) -> np.ndarray:
    p = (0.1 + 0.8 * ids.to_numpy() / num_rows).astype(np.float32)
    return logit(p.astype(np.float64))


@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 2.0), (0.9, 1.0), (1.0, 5.0)])
def test_the_loss_mixes_labels_and_softened_answers_as_the_formula_says(
    weight: float, temperature: float
) -> None:
    rng = np.random.default_rng(0)
    z, t, y = rng.normal(0, 2, 50), rng.normal(0, 2, 50), rng.integers(0, 2, 50)

    def cross_entropy(q: np.ndarray, logits: np.ndarray) -> np.ndarray:
        p = expit(logits)
        return -(q * np.log(p) + (1 - q) * np.log(1 - p))

    soft = cross_entropy(expit(t / temperature), z / temperature)
    expected = (1 - weight) * cross_entropy(y, z) + weight * temperature**2 * soft
    of_rows = torch.from_numpy(np.stack([t, y], axis=1))
    losses = Classification().training_losses(of_weight(weight, temperature))(
        torch.from_numpy(z), of_rows
    )
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-9)


def test_a_regression_learns_the_teachers_prediction_as_it_learns_the_label() -> None:
    objective = Regression(SCALE)
    outputs = torch.tensor([0.0, 1.0])
    answers, labels = torch.tensor([5300.0, 3300.0]), torch.tensor([3300.0, 5300.0])
    losses = objective.training_losses(of_weight(0.25, 2.0))(
        outputs, torch.stack([answers, labels], dim=1)
    )
    of_labels, of_answers = (objective.row_losses(outputs, of) for of in (labels, answers))
    torch.testing.assert_close(losses, 0.75 * of_labels + 0.25 * of_answers)


def test_answers_of_other_rows_are_refused(tmp_path: Path, store: ArtifactStore) -> None:
    rows = frame(800)
    data = dataset(store, rows)
    source = store.path(data.snapshot.data)
    strange = targets(scored(store, rows, "1" * 64))
    with pytest.raises(DataContractError, match="score the training window of the same snapshot"):
        write_distillation_targets(source, tmp_path / "t", asked(data, strange), store)
    fewer = targets(scored(store, rows[rows[COLUMNS.row_id] % 5 > 0], data.snapshot.data.sha256))
    with pytest.raises(DataContractError, match=r"no score for \d+ of the training rows"):
        write_distillation_targets(source, tmp_path / "t", asked(data, fewer), store)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_teacher_adds_an_answer_to_each_row_and_changes_no_step(
    tmp_path: Path, store: ArtifactStore, num_ranks: int
) -> None:
    rows = frame(1600)
    data = dataset(store, rows)
    answers = targets(scored(store, rows, data.snapshot.data.sha256))
    plain = job(tmp_path, rows)
    target = tmp_path / "distilled.parquet"
    write_distillation_targets(plain.snapshot_path, target, asked(data, answers), store)
    distilled = plain.model_copy(update={"snapshot_path": target, "distillation": answers})
    position = COLUMNS.numeric.index("temp")
    by_temperature = rows.set_index("temp")[COLUMNS.row_id]
    for ours, theirs in zip(
        opened(distilled, tmp_path, num_ranks), opened(plain, tmp_path, num_ranks), strict=True
    ):
        for one, other in zip(ours.training.batches(1), theirs.training.batches(1), strict=True):
            for a, b in zip(one.inputs, other.inputs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(one.labels[:, 1], other.labels)
            expected = expected_logit(by_temperature[one.inputs[1][:, position].numpy()], len(rows))
            np.testing.assert_allclose(one.labels[:, 0], expected, rtol=1e-4, atol=1e-5)
        for one, other in zip(ours.validation.blocks(), theirs.validation.blocks(), strict=True):
            assert torch.equal(labels_of(one.labels), other.labels)
            assert one.labels[:, 0].isnan().all()
