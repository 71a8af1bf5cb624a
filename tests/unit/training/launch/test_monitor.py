from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import pytest

from tasks.kernel.errors import TrainingError, TransientError
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import RunDirectory, TrainingJob
from tasks.training.launch import monitor as module
from tasks.training.launch.monitor import (
    SETTLE_S,
    RankLog,
    RunMonitor,
)
from tasks.training.launch.rank_group import RankGroup
from tests.support.data.builders import COLUMNS, splits
from tests.support.training.timed_ranks import write_clock
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
            write_clock(run.path, rank, doing="training", epoch=2, step=step)
        looked(monitor, ranks)
    clock.now += 61
    with pytest.raises(
        TransientError,
        match=r"no rank has made progress for 61 s .*rank 0: training, epoch 2, step 2; rank 1: ",
    ):
        looked(monitor, ranks)


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
            write_clock(run.path, rank, doing="training", epoch=1, step=step)
        looked(monitor, ranks)
    clock.now += 5
    with pytest.raises(TrainingError, match=r"time_limit_s=600; it has done 2 epoch\(s\)"):
        looked(monitor, ranks)
    assert seen == [0, 1]


def test_the_rank_furthest_behind_tells_how_long_it_will_take(
    run: RunDirectory, ranks: FakeRanks, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = monitor_of(run)
    with caplog.at_level("INFO"):
        for step in range(0, 50, 10):
            clock.now += 10
            for rank, ahead in enumerate((5, 0)):
                where = {"epoch": 0, "step": step + ahead, "num_steps_to_do": 100}
                write_clock(run.path, rank, rows_per_s=500.0, **where)
            looked(monitor, ranks)
    assert "epoch 1 of 8, step 40 of 100, 1000 rows/s, about 12.7 min left" in caplog.text


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
        log.add(1, "DEBUG only for the file")
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(level, f"rank 1: {message}")]
    assert "rank 1 | DEBUG only for the file" in (tmp_path / "training.log").read_text()
