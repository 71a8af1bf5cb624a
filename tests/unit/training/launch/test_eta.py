from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.launch.eta import LINE_EVERY_S, Eta, Position, duration


def test_a_line_says_where_how_fast_and_how_long() -> None:
    eta = Eta(num_epochs=8, steps_per_epoch=78, rows_per_step=2048)
    assert eta.line(100.0, Position(2, 0)) is None  # no speed yet
    line = eta.line(101.0, Position(2, 20))
    assert line is None  # too short to tell
    assert eta.line(110.0, Position(2, 40)) == (
        "epoch 3 of 8, step 40 of 78, 8,192 rows/s, about 2 min left"
    )


def test_lines_come_every_ten_seconds_however_short_an_epoch_is() -> None:
    eta = Eta(num_epochs=3, steps_per_epoch=100, rows_per_step=1)
    lines = [eta.line(float(s), Position(s // 50, 2 * (s % 50))) for s in range(150)]
    said_at = [s for s, line in enumerate(lines) if line]
    assert said_at == list(range(2, 150, 10))
    assert LINE_EVERY_S == 10


def test_a_resumed_run_is_not_credited_with_earlier_epochs() -> None:
    eta = Eta(num_epochs=10, steps_per_epoch=100, rows_per_step=10)
    eta.line(0.0, Position(8, 0))
    assert eta.line(20.0, Position(8, 20)) == (
        "epoch 9 of 10, step 20 of 100, 10 rows/s, about 3 min left"
    )


def test_after_a_step_back_the_speed_is_measured_anew() -> None:
    eta = Eta(num_epochs=2, steps_per_epoch=100, rows_per_step=1)
    eta.line(0.0, Position(0, 0))
    assert eta.line(10.0, Position(1, 0)) is not None
    assert eta.line(20.0, Position(0, 50)) is None
    line = eta.line(30.0, Position(0, 60))
    assert line is not None
    assert "1 rows/s" in line


def test_a_machine_that_got_slow_shows_within_a_minute() -> None:
    eta = Eta(num_epochs=1, steps_per_epoch=10_000, rows_per_step=1)
    for second in range(100):
        eta.line(float(second), Position(0, 50 * second))
    lines = [eta.line(float(second), Position(0, 4950 + second - 99)) for second in range(100, 171)]
    assert "1 rows/s" in [line for line in lines if line][-1]


def test_a_run_that_stands_still_says_so_with_its_last_speed_falling() -> None:
    eta = Eta(num_epochs=1, steps_per_epoch=100, rows_per_step=1)
    eta.line(0.0, Position(0, 0))
    first = eta.line(10.0, Position(0, 10))
    second = eta.line(50.0, Position(0, 10))
    assert first is not None
    assert second is not None
    assert "about 2 min left" in first
    assert "about 8 min left" in second


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5), st.integers(0, 99)), max_size=40),
)
def test_any_course_gives_lines_with_a_time_that_is_not_negative(
    course: list[tuple[float, int, int]],
) -> None:
    eta = Eta(num_epochs=6, steps_per_epoch=100, rows_per_step=64)
    now = 0.0
    for waited, epoch, step in course:
        now += waited
        line = eta.line(now, Position(epoch, step))
        assert line is None or re.search(r"about \d+ (s|min|h \d+ min) left$", line)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (5340, "89 min"), (12_000, "3 h 20 min")],
)
def test_durations_are_rounded_to_what_matters(seconds: float, text: str) -> None:
    assert duration(seconds) == text
