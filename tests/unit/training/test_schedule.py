from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.config import TrainingConfig
from tasks.training.schedule import MIN_STEPS_PER_EPOCH, StepPlan, one_cycle_rate


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
