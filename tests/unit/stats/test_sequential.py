"""The detector of a change at an unknown moment; the tests of releases are in `unit/release`."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.stats.sequential import change_wealth


@given(
    up=st.floats(0.05, 1), down=st.floats(0.05, 1), columns=st.integers(1, 3), n=st.integers(1, 7)
)
def test_without_a_change_the_wealth_is_the_number_of_days_on_average(
    up: float, down: float, columns: int, n: int
) -> None:
    """Over all sequences of a fair bet: up with down / (up + down), down with the rest."""
    expected = 0.0
    for rises in itertools.product([True, False], repeat=n):
        values = np.where(rises, up, -down)[:, None].repeat(columns, axis=1)
        chance = np.where(rises, down, up) / (up + down)
        expected += float(chance.prod() * np.exp(change_wealth(values)[-1]))
    assert np.isclose(expected, n)


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.1, 1))
def test_false_alarms_are_as_rare_as_promised_whenever_anybody_looks(
    seed: int, scale: float
) -> None:
    """An alarm within `n` of `c` days has a chance of n / c at most; three standard errors more."""
    n, limit, histories = 40, 200, 100
    values = scale * np.random.default_rng(seed).choice([-1.0, 1.0], size=(histories, n, 2))
    alarms = sum(change_wealth(each).max() >= np.log(limit) for each in values)
    chance = n / limit
    assert alarms / histories <= chance + 3 * np.sqrt(chance * (1 - chance) / histories)


def test_a_change_is_found_however_long_nothing_had_changed() -> None:
    draw = np.random.default_rng(1)
    for quiet in (10, 1000):
        values = draw.uniform(-1, 1, size=(quiet + 100, 1))
        values[quiet:] = np.clip(values[quiet:] + 0.4, -1, 1)
        assert quiet <= np.flatnonzero(change_wealth(values) >= np.log(3650))[0] < quiet + 90
