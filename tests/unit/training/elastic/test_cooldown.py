from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasks.training.elastic.cooldown import Cooldown


def test_each_failure_doubles_the_rest_up_to_the_bound() -> None:
    cooldown = Cooldown(5, 30)
    assert [cooldown.punish("h1-0", 0.0) for _ in range(5)] == [5, 10, 20, 30, 30]


def test_a_place_rests_and_comes_back_and_others_do_not_rest() -> None:
    cooldown = Cooldown(5, 30)
    cooldown.punish("h1-0", 100.0)
    assert cooldown.is_resting("h1-0", 104.9)
    assert not cooldown.is_resting("h1-0", 105.0)
    assert not cooldown.is_resting("h1-1", 101.0)


def test_long_use_without_a_failure_is_forgiven() -> None:
    cooldown = Cooldown(5, 30)
    cooldown.punish("h1", 0.0)
    assert cooldown.punish("h1", 10.0) == 10
    assert cooldown.punish("h1", 100.0) == 5


def test_a_clean_leave_is_held_against_nobody() -> None:
    cooldown = Cooldown(5, 30)
    cooldown.rest("h1", 25, 0.0)
    assert cooldown.is_resting("h1", 24.0)
    assert cooldown.punish("h1", 26.0) == 5


@given(st.integers(1, 3000), st.floats(0.1, 100), st.floats(1, 1000))
def test_no_rest_is_shorter_or_longer_than_the_bounds(
    failures: int, shortest: float, factor: float
) -> None:
    cooldown = Cooldown(shortest, shortest * factor)
    for _ in range(failures):
        assert shortest <= cooldown.punish("h1", 0.0) <= shortest * factor
