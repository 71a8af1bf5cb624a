from pathlib import Path

import numpy as np
import pytest

from tasks.evaluation.drift.statistics import MAX_CATEGORIES, count_categories, count_numbers
from tests.support.evaluation.windows import Columns, changes, window_of

MIN_EFFECT = 0.1


def stationary(seed: int, num_rows: int, num_columns: int = 12) -> Columns:
    """Numbers, some missing or mostly zero, and categories; the same law for every seed."""
    rng = np.random.default_rng(seed)
    columns: Columns = {}
    for number in range(num_columns // 4):
        columns[f"x{number}"] = rng.normal(size=num_rows)
        columns[f"y{number}"] = np.where(rng.random(num_rows) < 0.9, 0, rng.gamma(2, 1, num_rows))
        columns[f"z{number}"] = np.where(rng.random(num_rows) < 0.7, np.nan, rng.random(num_rows))
        columns[f"c{number}"] = rng.choice([f"v{i}" for i in range(40)], num_rows).tolist()
    return columns


@pytest.mark.parametrize("num_rows", [300, 1_000, 10_000])
def test_stationary_rows_never_drift_whatever_the_seed(tmp_path: Path, num_rows: int) -> None:
    for seed in range(12):
        found = changes(
            tmp_path, stationary(2 * seed, num_rows), stationary(2 * seed + 1, num_rows)
        )
        assert max(change.effect_low for change in found) < MIN_EFFECT


@pytest.mark.slow
def test_whole_days_that_lean_to_one_side_do_not_count_as_drift(tmp_path: Path) -> None:
    alarms = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        leaning = [
            {f"x{i}": rng.normal(size=(count, 1)) * 0.7 + rng.normal(size=(count, 100)) * 0.7
             for i in range(10)}
            for count in (60, 30)
        ]  # fmt: skip
        before, now = ({name: v.ravel() for name, v in part.items()} for part in leaning)
        alarms += any(c.effect_low > MIN_EFFECT for c in changes(tmp_path, before, now))
    assert alarms <= 1


def test_a_real_shift_is_found_among_many_columns_with_5000_rows(tmp_path: Path) -> None:
    before, now = stationary(0, 5_000, 60), stationary(1, 5_000, 60)
    now["x3"] = np.asarray(now["x3"], dtype=float) + 0.6
    now["y3"] = np.asarray(now["y3"], dtype=float) + 1.0
    now["c3"] = ["v0" if i % 3 == 0 else value for i, value in enumerate(now["c3"])]
    found = dict(zip(before, changes(tmp_path, before, now), strict=True))
    drifted = {name for name, change in found.items() if change.effect_low > MIN_EFFECT}
    assert drifted == {"x3", "y3", "c3"}


def test_the_effect_of_a_category_is_the_share_that_moved(tmp_path: Path) -> None:
    before = {"c": ["a"] * 500 + ["b"] * 500}
    now = {"c": ["a"] * 200 + ["b"] * 500 + ["new"] * 300}
    before["c"], now["c"] = (list(np.random.default_rng(0).permutation(v)) for v in
                             (before["c"], now["c"]))  # fmt: skip
    (change,) = changes(tmp_path, before, now)
    assert change.effect == pytest.approx(0.3)


def test_a_rise_of_missing_values_is_an_effect_of_its_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    before, now = rng.random(10_000), rng.random(10_000)
    now[rng.random(10_000) < 0.25] = np.nan
    (change,) = changes(tmp_path, {"x": before}, {"x": now})
    assert change.effect == pytest.approx(0.25, abs=0.02)
    assert change.missing_reference == 0
    assert change.missing_current == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("values", [np.full(1000, 3.0), np.full(1000, np.nan)])
def test_a_column_that_never_changes_does_not_drift(tmp_path: Path, values: np.ndarray) -> None:
    (change,) = changes(tmp_path, {"x": values}, {"x": values})
    assert change.effect == 0
    assert change.effect_low == 0


def test_infinite_values_fall_into_the_outer_bins(tmp_path: Path) -> None:
    before = window_of(tmp_path, {"x": np.arange(100.0)}, 5)
    now = window_of(tmp_path, {"x": np.array([-np.inf, np.inf, 5.0, np.nan])}, 2)
    totals = count_numbers(before.numbers("x"), now.numbers("x")).current.sum(axis=0)
    assert (totals[0], totals[1], totals[-1]) == (1, 1, 1)


def test_categories_rare_unseen_and_missing_have_bins_of_their_own(tmp_path: Path) -> None:
    frequent = [f"v{number:03d}" for number in range(MAX_CATEGORIES)]
    before = window_of(tmp_path, {"c": ["v000", *frequent * 2, "rare", None, ""]}, 3)
    now = window_of(tmp_path, {"c": ["v000", "rare", "new", "newer", None, *["v001"] * 3]}, 2)
    histogram = count_categories((before, before.categories("c")), (now, now.categories("c")))
    reference, current = histogram.reference.sum(axis=0), histogram.current.sum(axis=0)
    assert reference[[0, 1, 2, -2, -1]].tolist() == [2, 3, 2, 1, 0]
    assert current[[0, 1, 2, -2, -1]].tolist() == [1, 1, 3, 1, 2]
    assert histogram.unseen == pytest.approx(2 / 8)
