from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.conversion.gates.latency import (
    LEAST_CALLS,
    WARM_UP_CALLS,
    Timing,
    median_interval,
    time_interleaved,
)


def _timing(*rounds_ms: float) -> Timing:
    values = np.array(rounds_ms)
    return Timing(calls_ms=values, rounds_ms=values, cpu_rounds_ms=values)


@given(st.integers(6, 200))
def test_the_interval_holds_the_median_with_95_percent_and_not_much_more(count: int) -> None:
    interval = median_interval(np.arange(1, count + 1))
    rank = round(interval.low)
    assert interval.high == count + 1 - rank
    missed = 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
    narrower = missed + 2 * math.comb(count, rank) / 2**count
    assert missed <= 0.05 < narrower


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_values_are_enclosed_by_the_outermost(count: int) -> None:
    interval = median_interval(np.arange(count))
    assert (interval.low, interval.high) == (0, count - 1)


def test_a_slow_spell_of_the_machine_does_not_touch_the_ratio() -> None:
    load = np.array([1, 1, 9, 1, 4, 1, 1, 20, 1, 1])
    slow, fast = _timing(*(2.0 * load)), _timing(*(0.5 * load))
    assert fast.times_faster_than(slow).value == 4.0
    assert slow.times_faster_than(fast).high == 0.25


def test_runtimes_take_turns_and_each_is_first_as_often() -> None:
    order: list[str] = []

    def runtime(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    timings = time_interleaved({n: runtime(n) for n in "ABC"}, rounds=3, round_ms=1e-9)
    measured = "".join(order)[3 * WARM_UP_CALLS :]
    calls = LEAST_CALLS + 1  # the first of a turn is not timed
    assert measured == "".join(n * calls for n in "ABCBCACAB")
    assert all(len(t.rounds_ms) == 3 and len(t.calls_ms) == 9 for t in timings.values())


def test_short_calls_are_repeated_until_the_round_is_long_enough() -> None:
    timing = time_interleaved({"A": lambda: None}, rounds=2, round_ms=1.0)["A"]
    assert timing.calls_ms.sum() >= 2.0
    assert 0 < timing.p50_ms <= timing.p95_ms


def test_a_long_call_is_a_turn_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.conversion.gates.latency.SLOW_CALL_MS", -1.0)
    calls: list[int] = []
    timing = time_interleaved({"A": lambda: calls.append(1)}, rounds=4, round_ms=1.0)["A"]
    assert len(calls) == 1 + 4
    assert len(timing.calls_ms) == len(timing.rounds_ms) == len(timing.cpu_rounds_ms) == 4


def test_waiting_takes_time_and_no_processor() -> None:
    timing = time_interleaved({"A": lambda: time.sleep(0.01)}, rounds=2, round_ms=1.0)["A"]
    assert timing.p50_ms >= 10
    assert timing.cpu_ms < timing.p50_ms
    assert timing.cpu_ratio_to(timing) == 1
