"""Forecasts from days, and the replay of a trace of spot prices."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.telemetry import ResourceUse
from tasks.costs.forecast import by_day, days_until_full, mean_a_day, mean_wait, month_cost
from tasks.costs.trace import TraceRow, read_trace, replay
from tasks.kernel.errors import DataContractError

NOW = datetime(2026, 6, 21, 12, tzinfo=UTC)
Days = st.lists(st.floats(0, 1e6), min_size=7, max_size=40)


def amounts(days: list[float]) -> list[tuple[datetime, float]]:
    """The last one is of yesterday."""
    return [(NOW - timedelta(days=len(days) - i), amount) for i, amount in enumerate(days)]


def test_days_without_anything_are_zero_and_today_is_not_complete() -> None:
    found = by_day(
        [(NOW - timedelta(days=3), 5.0), (NOW, 99.0), (NOW - timedelta(days=1), 2.0)], NOW
    )
    assert found.tolist() == [5.0, 0.0, 2.0]
    assert by_day([], NOW).tolist() == []


def test_too_few_days_give_no_number() -> None:
    six = by_day(amounts([1.0] * 6), NOW)
    assert mean_a_day(six) is days_until_full(six, 100) is None
    assert month_cost(amounts([1.0] * 6), NOW) is mean_wait(amounts([1.0] * 6), NOW) is None


def test_equal_days_are_forecast_exactly() -> None:
    days = amounts([4.0] * 20)
    assert days_until_full(by_day(days, NOW), 92.0) == (23, 23, 23)
    assert month_cost(days, NOW) == pytest.approx((118, 118, 118))  # 20 days so far, 9.5 to come
    assert mean_wait(days, NOW) == (4, 4, 4)
    assert days_until_full(np.zeros(10), 92.0) == (math.inf,) * 3


@given(Days, st.floats(1, 1e9))
def test_a_forecast_lies_in_its_interval_in_order(days: list[float], free: float) -> None:
    found = days_until_full(by_day(amounts(days), NOW), free)
    assert found is not None
    assert found.low <= found.high
    mean = mean_a_day(np.array(days))
    assert mean is not None
    assert 0 <= mean.low <= mean.high
    if sum(days):
        assert found.value == pytest.approx(free * len(days) / sum(days), rel=1e-6)


def trace(*rows: tuple[float, float, bool]) -> list[TraceRow]:
    return [
        TraceRow(
            moment=NOW + timedelta(hours=at), hardware_class="cpu", price=price, evicted=evicted
        )
        for at, price, evicted in rows
    ]


ONE_HOUR = ResourceUse(seconds=3600, cpu_s=7200, amount=1.0)
"""On two cores."""


def test_work_since_the_last_checkpoint_is_paid_again() -> None:
    rows = trace((0, 1.0, False), (0.75, 1.0, True), (1.75, 0.5, False))
    found = replay([ONE_HOUR], rows[:1], 1800)
    assert (found.amount, found.hours) == (2.0, 1.0)
    kept = replay([ONE_HOUR], rows, 1800)  # half of the hour is kept, a quarter is done again
    from_each = (2 * (0.75 + 0.5 * 0.5), 2 * 0.5, 2 * 0.5)
    assert kept.amount == pytest.approx(sum(from_each) / 3)
    assert kept.hours == pytest.approx((2.25 + 2.0 + 1.0) / 3)
    assert replay([ONE_HOUR], trace((0, 1.0, True)), 60) is replay([], rows, 60) is None


@given(st.lists(st.tuples(st.floats(0.01, 2), st.booleans()), max_size=8))
def test_an_eviction_never_makes_work_cheaper(steps: list[tuple[float, bool]]) -> None:
    rows, at = list[tuple[float, float, bool]](), 0.0
    for hours, evicted in steps:
        rows.append((at, 1.0, evicted))
        at += hours
    found = replay([ONE_HOUR], trace(*rows, (at, 1.0, False)), 600)
    assert found.low >= 2.0 - 1e-9
    assert found.hours >= 1.0 - 1e-9


def test_a_trace_is_read_by_moment_and_another_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text(
        "moment,class,price,evicted\n2026-01-01T02:00Z,cpu,0.02,1\n2026-01-01T00:00Z,cpu,0.01,0\n"
    )
    assert [(row.price, row.evicted) for row in read_trace(file)] == [(0.01, False), (0.02, True)]
    file.write_text("a,b\n1,2\n")
    with pytest.raises(DataContractError, match="columns moment, class, price"):
        read_trace(file)
