from __future__ import annotations

import threading

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


def passes(breaker: Breaker) -> bool:
    try:
        breaker.check()
    except TransientError:
        return False
    return True


def test_after_a_failure_nobody_asks_until_the_pause_is_over_and_then_one_alone() -> None:
    clock = Clock()
    breaker = Breaker("the store", CONFIG, clock)
    assert passes(breaker)
    assert "the store could not be read: away" in str(breaker.failed(OSError("away")))
    assert not passes(breaker)
    clock.now = 1.01
    assert passes(breaker)
    assert not passes(breaker), "the others wait for what the first one meets"
    breaker.succeeded()
    assert passes(breaker)
    assert passes(breaker)


@pytest.mark.parametrize("met", [FeatureStoreError("no such table"), KeyboardInterrupt()])
def test_after_a_pause_a_read_that_met_no_failure_books_no_further_pause(
    met: BaseException,
) -> None:
    """An answer that cannot be used is an answer; one that was never given tells nothing."""
    clock = Clock()
    breaker = Breaker("the store", CONFIG, clock)
    breaker.failed(OSError("away"))
    clock.now = 1.01
    with pytest.raises(type(met)), breaker.attempt():
        raise met
    with breaker.attempt():
        pass
    assert passes(breaker)


@pytest.mark.parametrize("packed", [b"", b"junk", bytes(range(40)), b"\xff" * 40])
def test_a_stored_key_that_is_none_of_feast_is_named(packed: bytes) -> None:
    with pytest.raises(FeatureStoreError, match="no entity key of Feast"):
        key_values(packed, 3)


def test_pauses_double_up_to_the_longest_and_are_shortened_at_random() -> None:
    clock = Clock()
    breaker = Breaker("the store", CONFIG, clock)
    pauses = []
    for number in range(6):
        breaker.failed(OSError("away"))
        with pytest.raises(TransientError, match=f"the store failed {number + 1} time.*: away"):
            breaker.check()
        start = clock.now
        while not passes(breaker):
            clock.now += 0.01
        pauses.append(clock.now - start)
    for pause, whole in zip(pauses, [1, 2, 4, 8, 8, 8], strict=True):
        assert whole / 2 <= pause <= whole + 0.02


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


def test_many_threads_share_a_pool() -> None:
    in_use, most = set(), 0
    lock = threading.Lock()
    pool = Pool(object, lambda _: None, CONFIG.model_copy(update={"timeout_s": 30}))

    def work() -> None:
        nonlocal most
        for _ in range(50):
            with pool.lend() as connection:
                with lock:
                    assert connection not in in_use
                    in_use.add(connection)
                    most = max(most, len(in_use))
                with lock:
                    in_use.remove(connection)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= most <= 2
