"""PSI and distances against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy, ks_2samp

from tasks.stats.shift import PSI_PRIOR, distance, psi, shares


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=8),
    st.lists(st.integers(0, 1000), min_size=8, max_size=8),
)
def test_psi_is_the_sum_of_both_relative_entropies(left: list[int], right: list[int]) -> None:
    p, q = np.array(left, float), np.array(right[: len(left)], float)
    assert psi(p, q) == pytest.approx(psi(q, p))
    assert psi(p, q) >= 0
    assert psi(p, p) == 0
    both = [(counts + PSI_PRIOR) for counts in (p, q)]
    assert psi(p, q) == pytest.approx(entropy(*both) + entropy(*both[::-1]), abs=1e-12)


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_the_distance_of_numbers_is_that_of_kolmogorov_and_smirnov(
    left: list[int], right: list[int]
) -> None:
    p, q = (shares(np.bincount(values, minlength=10).astype(float)) for values in (left, right))
    assert distance(p - q, ordered=True) == pytest.approx(ks_2samp(left, right).statistic)
