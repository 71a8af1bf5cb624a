from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.features.config import OnlineConfig, ViewPolicy
from tasks.features.online.answer import Freshness, OnlineMetrics

AGES = st.one_of(st.just(np.nan), st.floats(-10, 1e6))


@given(
    reads=st.lists(
        st.lists(st.tuples(AGES, st.sampled_from(list(Freshness))), min_size=1, max_size=5),
        max_size=5,
    )
)
def test_counts_are_those_of_a_plain_loop(
    reads: list[list[tuple[float, Freshness]]],
) -> None:
    bounds = (1.0, 60.0, 3600.0)
    metrics = OnlineMetrics("redis", ["a", "b"], bounds)
    seen = []
    for rows in reads:
        rows = [(age, Freshness.MISSING if np.isnan(age) else state) for age, state in rows]
        seen += rows
        age_s = np.array([[age for age, _ in rows], [np.nan] * len(rows)])
        state = np.array([[state for _, state in rows], [Freshness.MISSING] * len(rows)], np.uint8)
        metrics.record(state, age_s)
    first, second = metrics.snapshot().views
    for state in Freshness:
        assert first.num_rows_by_state[state.label] == sum(s == state for _, s in seen)
    stored = [age for age, state in seen if state != Freshness.MISSING]
    for bound in bounds:
        assert first.num_rows_by_age_s[bound] == sum(age <= bound for age in stored)
    assert second.num_rows_by_state["missing"] == len(seen)
    assert set(second.num_rows_by_age_s.values()) == {0}
    assert metrics.snapshot().num_rows == len(seen)


def test_no_count_is_lost_between_threads() -> None:
    metrics = OnlineMetrics("redis", ["a"], (60.0,))
    state, age_s = np.zeros((1, 3), np.uint8), np.full((1, 3), 5.0)

    def work() -> None:
        for _ in range(200):
            metrics.record(state, age_s)
            metrics.failed()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = metrics.snapshot()
    assert (counted.num_reads, counted.num_rows, counted.num_failures) == (800, 2400, 800)
    assert counted.views[0].num_rows_by_age_s == {60.0: 2400}
    assert counted.views[0].age_sum_s == pytest.approx(12_000)


def test_a_snapshot_travels_as_json() -> None:
    metrics = OnlineMetrics("sqlite", ["a"], (60.0,))
    metrics.record(np.zeros((1, 1), np.uint8), np.zeros((1, 1)))
    snapshot = metrics.snapshot()
    assert type(snapshot).model_validate_json(snapshot.model_dump_json()) == snapshot


def test_blank_is_the_default_because_training_saw_blanks() -> None:
    assert OnlineConfig().policy == ViewPolicy(stale="null", missing="null")


def test_wrong_online_settings_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValidationError, match="do not rise; put them in order"):
        OnlineConfig(age_bounds_s=(60, 60))
    with pytest.raises(ValidationError, match=r"longest_pause_s=1\.0 is less than first_pause_s=2"):
        OnlineConfig(first_pause_s=2, longest_pause_s=1)
    with pytest.raises(ValidationError, match="'null', 'serve' or 'refuse'"):
        ViewPolicy(stale="ignore")  # type: ignore[arg-type]
