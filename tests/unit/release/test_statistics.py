"""The tests keep their promise against oracles: exact sums, brute force, simulated versions."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from tasks.release import measures
from tasks.release.config import ALPHA
from tasks.stats.sequential import final_log_wealth, log_wealth, mean_bounds

SHARES = (0.05, 0.25, 0.5)


def brute_force_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    wins = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high in scores[labels > 0]
        for low in scores[labels <= 0]
    ]
    return float(np.mean(wins))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=2, max_size=40))
def test_auc_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[bool, int]]) -> None:
    labels, scores = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    if len(set(labels)) < 2:
        assert np.isnan(measures.auc(labels, scores))
    else:
        assert measures.auc(labels, scores) == pytest.approx(brute_force_auc(labels, scores))


def test_a_unit_has_the_auc_of_its_rows() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.3).astype(float)
    scores = rng.integers(0, 5, (2, 300)).astype(float)
    ends = measures.unit_ends(labels)
    found = measures.unit_aucs(labels, scores)
    assert found.shape == (2, len(ends))
    for unit, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part = labels[start:end]
        assert min((part > 0).sum(), (part <= 0).sum()) == measures.NUM_OF_EACH
        for version in range(2):
            expected = brute_force_auc(part, scores[version, start:end])
            assert found[version, unit] == pytest.approx(expected)


@given(st.lists(st.booleans(), max_size=120), st.lists(st.booleans(), max_size=60))
def test_further_labels_leave_earlier_units_as_they_were(
    first: list[bool], more: list[bool]
) -> None:
    known = measures.unit_ends(np.array(first, dtype=float))
    assert measures.unit_ends(np.array([*first, *more], dtype=float))[: len(known)] == known


def test_the_mean_of_units_is_the_difference_of_the_aucs() -> None:
    rng = np.random.default_rng(1)
    labels = (rng.random(40_000) < 0.2).astype(float)
    stable = labels + rng.normal(size=labels.size)
    candidate = stable + rng.normal(size=labels.size)
    expected = measures.auc(labels, stable) - measures.auc(labels, candidate)
    found = measures.paired_auc_losses(labels, stable, candidate)
    assert 1500 < len(found) < 40_000 * 0.2 / measures.NUM_OF_EACH
    assert found.mean() == pytest.approx(expected, abs=0.01)
    half = rng.random(labels.size) < 0.25
    split = measures.unpaired_auc_losses(
        measures.Labelled(labels[~half], stable[~half]),
        measures.Labelled(labels[half], candidate[half]),
        0.25,
    )
    assert split.mean() == pytest.approx(expected, abs=0.05)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), max_size=12))
def test_wealth_is_the_mean_of_the_products_of_all_bets(values: list[float]) -> None:
    from tasks.stats.sequential import BETS

    y = np.array(values)
    expected = np.mean([np.prod(1 + bet * y) for bet in BETS])
    assert np.exp(final_log_wealth(y)) == pytest.approx(expected)
    if values:
        assert np.exp(log_wealth(y)[-1]) == pytest.approx(expected)


def test_wealth_has_mean_one_over_all_fair_sequences() -> None:
    sequences = np.array(list(product([-1.0, 1.0], repeat=10)))
    assert np.exp(log_wealth(sequences)).mean(axis=0) == pytest.approx(np.ones(10))


@given(st.lists(st.sampled_from([-0.5, -0.25, 0.0, 0.25, 0.5]), min_size=1, max_size=400))
def test_bounds_agree_with_the_test_and_hold_the_mean(values: list[float]) -> None:
    y = np.array(values)
    low, high = mean_bounds(y, 0.05)
    assert -1 <= low <= y.mean() <= high <= 1
    assert (low > 0) == (final_log_wealth(y) >= np.log(1 / 0.05)) or abs(low) < 1e-9


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("tolerated", [1.0, 1.5])
def test_evidence_on_events_has_at_most_mean_one_by_the_exact_binomial(
    share: float, tolerated: float
) -> None:
    n = 40
    x = np.arange(n + 1)
    evidence = np.exp(
        [measures.log_ratio_evidence([measures.Stratum(int(k), n, share)], tolerated) for k in x]
    )
    for ratio in (1.0, 0.3, tolerated):
        theta = share * ratio / (1 - share + share * ratio)
        mean = float((binom.pmf(x, n, theta) * evidence).sum())
        assert mean <= 1 + 1e-9
        if ratio == tolerated:
            assert mean == pytest.approx(1)


def test_evidence_of_several_splits_is_one_martingale() -> None:
    """The exact sum over two strata, the second one's split another."""
    total = 0.0
    for first, second in product(range(11), range(9)):
        strata = [measures.Stratum(first, 10, 0.05), measures.Stratum(second, 8, 0.5)]
        weight = binom.pmf(first, 10, 0.05) * binom.pmf(second, 8, 0.5)
        total += float(weight * np.exp(measures.log_ratio_evidence(strata)))
    assert total == pytest.approx(1)


def test_bounds_of_a_ratio_enclose_it() -> None:
    low, high = measures.ratio_bounds([measures.Stratum(60, 160, 0.25)], 0.01)
    assert low < (60 / 0.25) / (100 / 0.75) < high
    assert measures.ratio_bounds([], 0.01) == (0.0, float("inf"))
    assert measures.ratio_bounds([measures.Stratum(0, 5, 0.5)], 0.01)[0] == 0.0


@pytest.mark.parametrize("share", SHARES)
def test_evidence_on_the_split_has_mean_one_and_finds_a_wrong_one(share: float) -> None:
    x = np.arange(201)
    mean = float(
        (binom.pmf(x, 200, share) * np.exp(measures.log_split_evidence(x, 200, share))).sum()
    )
    assert mean == pytest.approx(1)
    assert measures.log_split_evidence(int(20_000 * share), 20_000, share) < 0
    assert measures.log_split_evidence(int(20_000 * share * 1.3), 20_000, share) > np.log(1000)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
)
def test_distance_is_the_largest_gap(first: list[int], second: list[int]) -> None:
    a, b = np.array(first, dtype=float), np.array(second, dtype=float)
    expected = max(abs((a <= x).mean() - (b <= x).mean()) for x in range(7))
    low, seen, high = measures.distance_bounds(a, b, 0.05)
    assert seen == pytest.approx(expected)
    assert 0 <= low <= seen <= high <= 1
    assert measures.distance_bounds(a, b[:0], 0.05) == (0.0, 0.0, 1.0)


def test_the_band_shrinks_and_holds_at_all_times() -> None:
    rng = np.random.default_rng(3)
    assert measures.radius(0, 0.05) == 1.0
    assert measures.radius(1000, 0.05) == pytest.approx(0.0865691)  # the corollary, by hand
    assert measures.radius(100_000, 0.05) < measures.radius(1000, 0.05)
    looks = [10, 100, 1000, 3000]
    missed = 0
    for _ in range(100):
        values = np.sort(rng.random((4, 3000)), axis=0)[0]  # one path; its law is known
        values = 1 - (1 - values) ** 4
        gaps = [
            np.abs(
                np.searchsorted(np.sort(values[:n]), np.linspace(0, 1, 101)) / n
                - np.linspace(0, 1, 101)
            ).max()
            > measures.radius(n, 0.05)
            for n in looks
        ]
        missed += any(gaps)
    assert missed <= 5


def test_errors_of_a_regression_are_cut_and_bounded() -> None:
    rng = np.random.default_rng(4)
    truth = rng.normal(size=5000)
    stable, candidate = truth + rng.normal(size=5000), truth + 2 * rng.standard_t(1, size=5000)
    found = measures.paired_error_losses(truth, stable, candidate)
    assert np.abs(found).max() <= 1
    assert final_log_wealth(found) > np.log(1000)
    assert final_log_wealth(-found) < 0
    assert measures.error_cut(measures.Labelled(np.zeros(3), np.zeros(3))) > 0
    assert len(measures.paired_error_losses(truth[:100], stable[:100], candidate[:100])) == 0


def test_all_tests_together_spend_a_chance_of_one_in_twenty() -> None:
    assert sum(ALPHA) == pytest.approx(0.05)
