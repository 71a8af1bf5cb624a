import re

import pytest

from tasks.features.config import OnlineConfig
from tasks.features.online import backend
from tasks.features.online.backend import Breaker, Pool, key_values
from tasks.kernel.errors import FeatureStoreError, TransientError

CONFIG = OnlineConfig(max_connections=2, timeout_s=0.05)


@pytest.fixture(autouse=True)
def _pauses_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "FIRST_PAUSE_S", 1)
    monkeypatch.setattr(backend, "LONGEST_PAUSE_S", 8)


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: Breaker) -> str:
    with pytest.raises(TransientError) as met, breaker.attempt():
        raise OSError("away")
    return str(met.value)


def refused(breaker: Breaker) -> str:
    with pytest.raises(TransientError) as met, breaker.attempt():
        pytest.fail("it was let through")
    return str(met.value)


def test_after_a_failure_nobody_asks_until_the_pause_is_over_and_then_one_alone() -> None:
    clock = Clock()
    breaker = Breaker("the store", (OSError,), clock)
    assert "the store could not be read: away" in fail(breaker)
    refused(breaker)
    clock.now = 1.01
    with breaker.attempt():
        refused(breaker)  # the others wait for what the first one meets
    with breaker.attempt(), breaker.attempt():
        pass


@pytest.mark.parametrize("met", [FeatureStoreError("no such table"), KeyboardInterrupt()])
def test_after_a_pause_a_read_that_met_no_failure_books_no_further_pause(
    met: BaseException,
) -> None:
    """An answer that cannot be used is an answer; one that was never given tells nothing."""
    clock = Clock()
    breaker = Breaker("the store", (OSError,), clock)
    fail(breaker)
    clock.now = 1.01
    with pytest.raises(type(met)), breaker.attempt():
        raise met
    with breaker.attempt():
        pass


@pytest.mark.parametrize("packed", [b"", b"junk", bytes(range(40)), b"\xff" * 40])
def test_a_stored_key_that_is_none_of_feast_is_named(packed: bytes) -> None:
    with pytest.raises(FeatureStoreError, match="no entity key of Feast"):
        key_values(packed)


def test_pauses_double_up_to_the_longest_and_are_shortened_at_random() -> None:
    clock = Clock()
    breaker = Breaker("the store", (OSError,), clock)
    for number, whole in enumerate([1, 2, 4, 8, 8, 8]):
        fail(breaker)
        told = refused(breaker)
        assert f"the store failed {number + 1} time(s) in a row, last with: away" in told
        assert whole / 2 - 0.1 <= float(re.findall(r"another ([0-9.]+) s", told)[0]) <= whole
        clock.now += whole


def test_connections_are_lent_again_but_not_after_an_error() -> None:
    opened: list[int] = []
    closed: list[int] = []

    def connect() -> int:
        opened.append(len(opened))
        return opened[-1]

    pool = Pool(connect, closed.append, CONFIG)
    with pool.lend() as first:
        pass
    with pool.lend() as second:
        assert second == first
    with pytest.raises(KeyError), pool.lend():
        raise KeyError
    assert closed == [0]
    with pool.lend() as third:
        assert third == 1
    pool.close()
    assert closed == [0, 1]


def test_no_more_connections_are_open_than_allowed() -> None:
    pool = Pool(object, lambda _: None, CONFIG)
    with pool.lend(), pool.lend(), pytest.raises(TransientError, match="all 2 connections"):
        with pool.lend():
            pass
    with pool.lend():
        pass
