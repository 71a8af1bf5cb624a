from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluation.drift.statistics import count_categories, count_numbers, quantile_cuts
from tests.support.evaluation.windows import window_of


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=200), st.sampled_from([10, 20, 100]))
def test_coarse_cuts_are_among_the_fine_ones(values: list[int], num_bins: int) -> None:
    numbers = np.sort(np.array(values, float))
    fine, coarse = quantile_cuts(numbers, num_bins), quantile_cuts(numbers, 10)
    assert np.isin(coarse, fine).all()
    assert (np.diff(fine) > 0).all()


def test_a_value_that_fills_a_bin_has_it_to_itself() -> None:
    cuts = quantile_cuts(np.concatenate([np.zeros(50), np.arange(1, 51)]), 10)
    assert np.searchsorted(cuts, 1e-9, "right") == np.searchsorted(cuts, 0, "right") + 1
    assert np.searchsorted(cuts, -1e-9, "right") == np.searchsorted(cuts, 0, "right") - 1


def test_every_row_is_counted_once_by_day(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = np.where(rng.random(1000) < 0.1, np.nan, rng.normal(size=1000))
    other = np.where(rng.random(400) < 0.3, np.nan, rng.normal(5, 9, size=400))
    before, now = window_of(tmp_path, {"x": values}, 10), window_of(tmp_path, {"x": other}, 4)
    histogram = count_numbers(before.numbers("x"), now.numbers("x"), 20, 10)
    assert histogram.reference.sum(axis=1).tolist() == [100] * 10
    assert histogram.current.sum(axis=1).tolist() == [100] * 4
    assert histogram.reference[:, 0].sum() == np.isnan(values).sum()
    known = histogram.reference[:, 1:].sum(axis=0)
    assert known.max() - known.min() <= 2
    assert histogram.group_starts[0] == 0
    assert len(histogram.group_starts) == 11  # missing, and ten bins of the known


def test_infinite_values_fall_into_the_outer_bins(tmp_path: Path) -> None:
    before = window_of(tmp_path, {"x": np.arange(100.0)}, 5)
    now = window_of(tmp_path, {"x": np.array([-np.inf, np.inf, 5.0, np.nan])}, 2)
    histogram = count_numbers(before.numbers("x"), now.numbers("x"), 10, 10)
    totals = histogram.current.sum(axis=0)
    assert (totals[0], totals[1], totals[-1]) == (1, 2, 1)


def test_categories_rare_unseen_and_missing_have_bins_of_their_own(tmp_path: Path) -> None:
    before = window_of(tmp_path, {"c": ["a"] * 6 + ["b"] * 3 + ["rare", None, ""]}, 3)
    now = window_of(tmp_path, {"c": ["b", "rare", "new", "newer", None, "a", "a", "a"]}, 2)
    histogram = count_categories((before, before.categories("c")), (now, now.categories("c")), 2)
    assert histogram.reference.sum(axis=0).tolist() == [2, 6, 3, 1, 0]
    assert histogram.current.sum(axis=0).tolist() == [1, 3, 1, 1, 2]
    assert histogram.unseen == pytest.approx(2 / 8)


def test_a_reference_without_any_known_value_can_still_be_counted(tmp_path: Path) -> None:
    before = window_of(tmp_path, {"x": np.full(10, np.nan), "c": [None] * 9 + [""]}, 2)
    now = window_of(tmp_path, {"x": np.arange(10.0), "c": ["a"] * 10}, 2)
    numbers = count_numbers(before.numbers("x"), now.numbers("x"), 10, 10)
    assert numbers.current.sum(axis=0).tolist() == [0, 10]
    names = count_categories((before, before.categories("c")), (now, now.categories("c")), 5)
    assert names.unseen == 1
