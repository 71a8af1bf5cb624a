from datetime import date, timedelta

import numpy as np
import pytest

from tasks.contracts.drift import DayErrors, SlowChange
from tasks.evaluation.config import DriftConfig
from tasks.evaluation.drift.slow import (
    describe,
    directions,
    error_parts,
    find_slow_change,
    join_days,
    score_days,
)
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders
from tests.support.evaluation.windows import scored

CONFIG, FIRST = DriftConfig(), date(2013, 4, 1)
Stale = np.ndarray


def days(seed: int, number: int, turned: Stale | float = 0.0, first: int = 0) -> list[DayErrors]:
    """Days of 200 rows with storms of their own; a share of each day's labels is turned."""
    draw = np.random.default_rng(seed)
    found = []
    for n, share in enumerate(np.broadcast_to(turned, number)):
        logit = draw.normal(-1.2, 1, 200)
        score = 1 / (1 + np.exp(-logit))
        label = (draw.random(200) < 1 / (1 + np.exp(-logit - draw.normal(0, 0.4)))).astype(float)
        label = np.where(draw.random(200) < share, 1 - label, label)
        bias, error, slope = (float(part.mean()) for part in error_parts(label, score, True))
        day = FIRST + timedelta(days=first + n)
        found.append(DayErrors(day=day, num_rows=200, bias=bias, error=error, slope=slope))
    return found


def test_labels_that_turn_a_thousandth_more_each_day_are_found_within_a_season() -> None:
    ramp = np.concatenate([np.zeros(30), 0.001 * np.arange(90)])
    found = find_slow_change(days(1, 60), days(2, 120, ramp, first=60), CONFIG)
    assert found is not None
    assert found.began is not None
    assert found.evidence >= found.limit == 120
    assert FIRST + timedelta(days=80) < found.began < FIRST + timedelta(days=180)
    assert f"since about {found.began}" in describe(found)


def test_days_without_a_change_raise_about_one_alarm_a_year_at_most() -> None:
    """Twelve histories of 120 days, the last day of each: four years."""
    results = [
        find_slow_change(days(seed, 60), days(100 + seed, 120, first=60), CONFIG)
        for seed in range(12)
    ]
    assert all(isinstance(each, SlowChange) for each in results)
    assert sum(each is not None and each.began is not None for each in results) <= 4


def test_windows_that_overlap_count_each_day_once_and_whole() -> None:
    now = days(3, 40, first=60)
    cut = now[20].model_copy(update={"num_rows": 20, "error": 9.0})
    assert join_days(now[:30], [cut], now[20:]) == tuple(now)
    whole = find_slow_change(days(1, 60), now, CONFIG)
    assert whole is not None
    assert whole.num_days == 40
    assert whole.began is None
    assert "No slow change" in describe(whole)
    left_out = find_slow_change(days(1, 60), [*now[:20], cut, *now[21:]], CONFIG)
    assert left_out is not None
    assert left_out.num_days == 39


def test_the_reference_and_the_days_before_it_are_no_evidence() -> None:
    reference = days(1, 60)
    assert find_slow_change(reference, reference, CONFIG) is None
    assert find_slow_change(reference[:20], days(2, 30, first=60), CONFIG) is None


def test_a_storm_moves_the_error_and_not_the_slope() -> None:
    """A day on which all are later than their scores moves all three numbers together."""
    draw = np.random.default_rng(0)
    storms = draw.normal(size=(200, 1)) * [1.0, 0.8, -0.9] + draw.normal(size=(200, 3)) * 0.1
    found = directions(storms[:100], storms[100:])
    assert abs(np.corrcoef(storms[100:, 0], found[:, 1])[0, 1]) < 0.3
    assert np.corrcoef(storms[100:, 0], found[:, 0])[0, 1] > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_true_probabilities_have_no_bias_no_excess_and_no_slope(seed: int) -> None:
    draw = np.random.default_rng(seed)
    score = draw.uniform(0.01, 0.99, 200_000)
    parts = error_parts((draw.random(len(score)) < score).astype(float), score, True)
    assert all(abs(part.mean()) < 4 * part.std() / np.sqrt(len(score)) for part in parts)


def test_a_window_is_taken_apart_into_its_days(store: ArtifactStore) -> None:
    dataset, window = builders.dataset(store, builders.frame(2000)), builders.month(7, 2)
    found = score_days(scored(store, dataset, window), dataset.snapshot.columns, store)
    assert [each.day for each in found] == sorted({each.day for each in found})
    assert window.start.date() <= found[0].day
    assert found[-1].day < window.end.date()
    several = dataset.snapshot.columns.model_copy(update={"classes": ("a", "b", "c")})
    assert score_days(scored(store, dataset, window), several, store) == ()
