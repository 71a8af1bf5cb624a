import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, r2_score, roc_auc_score

from tasks.kernel.errors import DataContractError
from tasks.training.config import TrainingConfig
from tasks.training.core.objective import (
    MIN_STEPS_PER_EPOCH,
    MultiClass,
    Regression,
    StepPlan,
    averaged,
    histogram_auc,
    one_cycle_rate,
    score_histograms,
)
from tasks.training.data.decode import RowFacts
from tasks.training.data.opening import fit_labels
from tests.support.data.builders import COLUMNS
from tests.support.training.parents import SCALE
from tests.support.training.reading_ranks import training_job
from tests.support.training.thread_ranks import on_threads


@given(st.integers(0, 10_000), st.integers(4, 400), st.floats(0, 3))
def test_auc_agrees_with_scikit_learn(seed: int, num_rows: int, signal: float) -> None:
    rng = np.random.default_rng(seed)
    labels = (np.arange(num_rows) % 3 == 0).astype(np.float32)
    logits = rng.normal(size=num_rows) + signal * labels
    scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    ours = histogram_auc(score_histograms(scores, labels))
    assert ours == pytest.approx(roc_auc_score(labels, scores), abs=2e-3)


NUMBERS = COLUMNS.model_copy(update={"task": "regression"})
JOB = training_job(columns=NUMBERS)


def facts_of(labels: np.ndarray) -> RowFacts:
    """What decoding notes of one part's labels."""
    mean = float(labels.mean()) if len(labels) else 0.0
    squares = float(((labels - mean) ** 2).sum())
    facts = RowFacts.none_of(NUMBERS)
    facts.num_rows, facts.label_mean, facts.label_squares = len(labels), mean, squares
    return facts


@given(st.integers(2, 200), st.integers(0, 9), st.integers(1, 4))
def test_r2_from_totals_of_any_parts_is_that_of_all_rows(
    num_rows: int, seed: int, num_parts: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.normal(3300, 2000, num_rows).astype(np.float32))
    outputs = torch.from_numpy(rng.normal(0, 1, num_rows).astype(np.float32))
    objective = Regression(SCALE)
    parts = np.array_split(np.arange(num_rows), num_parts)
    totals = sum(objective.totals(outputs[part], labels[part]) for part in parts)
    predicted = outputs.double() * SCALE.deviation + SCALE.mean
    assert objective.quality(totals)["validation_r2"] == pytest.approx(
        r2_score(labels.double().numpy(), predicted.numpy()), rel=1e-6, abs=1e-6
    )


def test_the_loss_of_a_large_error_grows_with_its_size_and_not_its_square() -> None:
    losses = Regression(SCALE).row_losses(torch.zeros(3), torch.tensor([3300.0, 5300.0, 103300.0]))
    assert losses.tolist() == pytest.approx([0.0, 0.5, 49.5])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_agree_on_the_labels_scale_whatever_rows_they_hold(num_ranks: int) -> None:
    labels = np.random.default_rng(4).normal(3300, 2000, 1000)
    parts = np.array_split(labels, num_ranks)
    scales = on_threads(num_ranks, lambda rank: fit_labels(facts_of(parts[rank.rank]), JOB, rank))
    assert len(set(scales)) == 1
    assert scales[0].mean == pytest.approx(labels.mean(), rel=1e-6)
    assert scales[0].deviation == pytest.approx(labels.std(), rel=1e-6)


def test_labels_that_are_all_equal_are_refused() -> None:
    with pytest.raises(DataContractError, match="standard deviation 0 in 5 training rows"):
        on_threads(1, lambda rank: fit_labels(facts_of(np.full(5, 7.0)), JOB, rank))


@given(st.integers(1, 100_000), st.integers(1, 512))
def test_a_plan_never_asks_for_more_rows_than_the_smallest_shard_has(
    smallest: int, rows_per_shard: int
) -> None:
    plan = StepPlan.of(smallest, TrainingConfig(num_shards=4, global_batch_size=4 * rows_per_shard))
    assert 1 <= plan.rows_per_shard <= rows_per_shard
    assert plan.num_steps >= min(MIN_STEPS_PER_EPOCH, smallest)
    assert plan.num_steps * plan.rows_per_shard <= smallest
    assert smallest - plan.num_steps * plan.rows_per_shard < plan.rows_per_shard


@given(st.integers(1, 5000))
def test_the_learning_rate_rises_to_its_peak_and_falls_to_nothing(num_steps: int) -> None:
    rates = [one_cycle_rate(step, num_steps, 0.1) for step in range(num_steps)]
    top = rates.index(max(rates))
    assert all(0 < rate <= 0.1 for rate in rates)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if num_steps > 50:
        assert max(rates) == pytest.approx(0.1, rel=0.01)
        assert rates[-1] < 0.001


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=12), st.floats(0, 0.95))
def test_each_epoch_counts_less_in_the_mean_than_the_next(
    values: list[float], decay: float
) -> None:
    mean: dict[str, torch.Tensor] = {}
    for number, value in enumerate(values, 1):
        mean = averaged(mean, {"weight": torch.tensor([value])}, number, decay)
    factors = [decay**age for age in range(len(values))][::-1]
    expected = sum(f * v for f, v in zip(factors, values, strict=True)) / sum(factors)
    assert mean["weight"].item() == pytest.approx(expected, abs=1e-4)


def test_what_is_not_trained_stays_as_it_is() -> None:
    edges = {"low": torch.tensor([-torch.inf, 0.1]), "seen": torch.tensor(3)}
    mean = averaged(averaged({}, edges, 1, 0.5), {**edges, "seen": torch.tensor(4)}, 2, 0.5)
    assert torch.equal(mean["low"], edges["low"])
    assert mean["seen"].item() == 4


@given(st.integers(0, 10_000), st.integers(3, 5), st.integers(1, 4))
def test_classes_are_compared_by_the_mean_of_their_aucs(
    seed: int, num_classes: int, num_parts: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = np.arange(300) % num_classes
    logits = (rng.normal(size=(300, num_classes)) + np.eye(num_classes)[labels]).astype(np.float32)
    objective, known = MultiClass(num_classes), torch.from_numpy(labels.astype(np.float32))
    outputs = torch.from_numpy(logits)
    parts = np.array_split(np.arange(300), num_parts)
    totals = sum(objective.totals(outputs[part], known[part]) for part in parts)
    scores = torch.softmax(outputs.double(), 1).numpy()
    macro = roc_auc_score(labels, scores, multi_class="ovr")
    assert objective.quality(totals)["validation_auc"] == pytest.approx(macro, abs=2e-3)
    losses = objective.row_losses(outputs, known)
    assert float(losses.mean()) == pytest.approx(log_loss(labels, scores), rel=1e-5)


def test_a_class_that_validation_lacks_is_refused() -> None:
    objective = MultiClass(3)
    totals = objective.totals(torch.zeros(4, 3), torch.tensor([0.0, 1.0, 1.0, 0.0]))
    with pytest.raises(DataContractError, match=r"class\(es\) number \[2\]"):
        objective.quality(totals)
