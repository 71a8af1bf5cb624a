from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.config import TrainingConfig
from tasks.training.core.objective import MIN_STEPS_PER_EPOCH, StepPlan, averaged, one_cycle_rate


@given(st.integers(1, 100_000), st.integers(1, 512))
def test_a_plan_never_asks_for_more_rows_than_the_smallest_shard_has(
    smallest: int, rows_per_shard: int
) -> None:
    config = TrainingConfig(num_shards=4, global_batch_size=4 * rows_per_shard)
    plan = StepPlan.of(smallest, config)
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
