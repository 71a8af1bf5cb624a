from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.kernel.errors import TrainingError, TransientError
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import RankProgress, RunDirectory, RunPlan, TrainingJob
from tasks.training.launch import monitor as module
from tasks.training.launch.monitor import (
    BURST_LINES,
    LINES_PER_S,
    SETTLE_S,
    Eta,
    RankLog,
    RunMonitor,
    duration,
)
from tasks.training.launch.rank_group import RankGroup
from tests.support.data.builders import COLUMNS, splits
from tests.support.training.trials import epoch


class FakeRanks:
    """Ranks that only end when a test says so."""

    def __init__(self) -> None:
        self.exit_codes: dict[int, int] = {}
        self.num_stops = 0

    def stop(self) -> None:
        self.num_stops += 1


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def ranks() -> FakeRanks:
    return FakeRanks()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def monitor_of(run: RunDirectory, seen: list[int] | None = None) -> RunMonitor:
    config = TrainingConfig(progress_timeout_s=60, time_limit_s=600)
    job = TrainingJob(
        snapshot_path=run.path / "none", columns=COLUMNS, splits=splits(), config=config
    )
    epochs = [] if seen is None else seen
    return RunMonitor(run, job, lambda metrics: epochs.append(metrics.epoch))


def looked(monitor: RunMonitor, ranks: FakeRanks) -> None:
    monitor.check_ranks(cast(RankGroup, ranks))


def test_silence_of_all_ranks_ends_the_run_and_tells_where_each_was(
    run: RunDirectory, ranks: FakeRanks, clock: Clock
) -> None:
    monitor = monitor_of(run)
    for step in range(3):
        clock.now += 50
        for rank in (0, 1):
            run.write_progress(rank, RankProgress(doing="training", epoch=2, step=step))
        looked(monitor, ranks)
    clock.now += 61
    with pytest.raises(
        TransientError,
        match=r"no rank has made progress for 61 s .*rank 0: training, epoch 2, step 2; rank 1: ",
    ):
        looked(monitor, ranks)


def test_a_rank_that_waits_for_a_busy_one_is_let_alone(
    run: RunDirectory, ranks: FakeRanks, clock: Clock
) -> None:
    monitor = monitor_of(run)
    run.write_progress(1, RankProgress(doing="fitting the preprocessing"))
    for step in range(5):
        clock.now += 50
        run.write_progress(0, RankProgress(doing="reading rows", step=step))
        looked(monitor, ranks)
    assert ranks.num_stops == 0


def test_the_ranks_left_behind_by_a_failed_one_are_stopped_after_a_while(
    run: RunDirectory, ranks: FakeRanks, clock: Clock
) -> None:
    monitor = monitor_of(run)
    ranks.exit_codes = {1: 1}
    looked(monitor, ranks)
    clock.now += SETTLE_S - 0.1
    looked(monitor, ranks)
    assert ranks.num_stops == 0
    clock.now += 0.2
    looked(monitor, ranks)
    assert ranks.num_stops == 1


def test_an_attempt_that_takes_too_long_says_how_far_it_came(
    run: RunDirectory, ranks: FakeRanks, clock: Clock
) -> None:
    seen: list[int] = []
    monitor = monitor_of(run, seen)
    run.rewrite_epochs([epoch(0), epoch(1)])
    for step in range(13):
        clock.now += 46
        for rank in (0, 1):
            run.write_progress(rank, RankProgress(doing="training", epoch=1, step=step))
        looked(monitor, ranks)
    clock.now += 5
    with pytest.raises(TrainingError, match=r"time_limit_s=600; it has done 2 epoch\(s\)"):
        looked(monitor, ranks)
    assert seen == [0, 1]


def test_the_rank_furthest_behind_tells_how_long_it_will_take(
    run: RunDirectory, ranks: FakeRanks, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    run.write_plan(RunPlan(steps_per_epoch=100, rows_per_step=1000))
    monitor = monitor_of(run)
    with caplog.at_level("INFO"):
        for step in range(0, 50, 10):
            clock.now += 10
            run.write_progress(0, RankProgress(doing="training", epoch=0, step=step + 5))
            run.write_progress(1, RankProgress(doing="training", epoch=0, step=step))
            looked(monitor, ranks)
    assert "epoch 1 of 8, step 40 of 100, 1,000 rows/s, about 13 min left" in caplog.text


def eta(num_epochs: int, steps_per_epoch: int = 100, rows_per_step: int = 1) -> Eta:
    return Eta(num_epochs, RunPlan(steps_per_epoch=steps_per_epoch, rows_per_step=rows_per_step))


def test_lines_come_every_ten_seconds_and_a_resumed_run_is_not_credited_with_earlier_epochs() -> (
    None
):
    of_run = eta(10, rows_per_step=10)
    lines = [of_run.line(float(second), 8, second) for second in range(60)]
    assert [second for second, line in enumerate(lines) if line] == [10, 20, 30, 40, 50]
    assert lines[20] == "epoch 9 of 10, step 20 of 100, 10 rows/s, about 3 min left"


def test_after_a_step_back_the_speed_is_measured_again() -> None:
    of_run = eta(2)
    of_run.line(0.0, 0, 0)
    assert of_run.line(20.0, 0, 50) is not None
    assert of_run.line(30.0, 0, 10) is None
    line = of_run.line(40.0, 0, 20)
    assert line is not None
    assert "1 rows/s" in line


def test_a_machine_that_got_slow_shows_within_a_minute() -> None:
    of_run = eta(1, 10_000)
    lines = [of_run.line(float(s), 0, 50 * s) for s in range(100)]
    lines = [of_run.line(float(s), 0, 4950 + s - 99) for s in range(100, 171)]
    assert "1 rows/s" in [line for line in lines if line][-1]


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5), st.integers(0, 99)), max_size=40),
)
def test_any_course_gives_lines_with_a_time_that_is_not_negative(
    course: list[tuple[float, int, int]],
) -> None:
    of_run = eta(6, rows_per_step=64)
    now = 0.0
    for waited, number, step in course:
        now += waited
        line = of_run.line(now, number, step)
        assert line is None or re.search(r"about \d+ (s|min|h \d+ min) left$", line)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (5340, "89 min"), (12_000, "3 h 20 min")],
)
def test_durations_are_rounded_to_what_matters(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_all_lines_reach_the_file_and_few_reach_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "training.log"
    with caplog.at_level(logging.DEBUG), RankLog(path) as log:
        for number in range(100):
            log.add(0, f"INFO line {number}")
        log.add(1, "DEBUG only for the file")
    text = path.read_text()
    assert text.count("rank 0 | INFO line") == 100
    assert "rank 1 | DEBUG only for the file" in text
    assert caplog.text.count("rank 0: line") < 100
    assert "more lines of the ranks are in training.log" in caplog.text
    assert "only for the file" not in caplog.text
    assert LINES_PER_S < 100


def test_what_ranks_say_at_their_start_is_never_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), RankLog(tmp_path / "training.log") as log:
        for number in range(BURST_LINES):
            log.add(number % 2, f"INFO holds shard {number}")
    assert caplog.text.count("holds shard") == BURST_LINES


def test_no_warning_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), RankLog(tmp_path / "training.log") as log:
        for number in range(50):
            log.add(1, f"WARNING checkpoint {number} is damaged")
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 50
    assert warnings[0].getMessage() == "rank 1: checkpoint 0 is damaged"


def test_another_attempt_adds_to_the_file(tmp_path: Path) -> None:
    for attempt in range(2):
        with RankLog(tmp_path / "training.log") as log:
            log.note(f"attempt {attempt}")
    assert (tmp_path / "training.log").read_text() == "attempt 0\nattempt 1\n"


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        ("INFO holds 5 rows", logging.INFO, "holds 5 rows"),
        ("ERROR no such thing", logging.ERROR, "no such thing"),
        (
            "[2026-01-01 10:00:00.1: W /source/stall_inspector.cc:107] One or more",
            logging.WARNING,
            "[2026-01-01 10:00:00.1: W /source/stall_inspector.cc:107] One or more",
        ),
    ],
)
def test_a_lines_level_is_read_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str, level: int, message: str
) -> None:
    with caplog.at_level(logging.INFO), RankLog(tmp_path / "training.log") as log:
        log.add(1, line)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(level, f"rank 1: {message}")]


def test_what_a_rank_says_without_a_level_is_in_the_file_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), RankLog(tmp_path / "training.log") as log:
        log.add(1, "Traceback (most recent call last):")
        log.add(1, "USDT: profiler_start")
    assert not caplog.records
    assert "rank 1 | Traceback" in (tmp_path / "training.log").read_text()
