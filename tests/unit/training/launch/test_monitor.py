import logging
from pathlib import Path
from typing import cast

import pytest

from tasks.kernel.errors import TrainingError, TransientError
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import RunDirectory
from tasks.training.launch import monitor as module
from tasks.training.launch.monitor import SETTLE_S, RankLog, RunMonitor
from tasks.training.launch.rank_group import RankGroup
from tests.support.data.builders import epoch
from tests.support.training.reading_ranks import training_job
from tests.support.training.timed_ranks import write_clock


class Watched:
    """A monitor of two ranks, whose clock moves and whose ranks end when a test says so."""

    now = 1000.0

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "time", self)
        self.run, self.epochs = RunDirectory(folder), list[int]()
        self.exit_codes: dict[int, int] = {}
        self.num_stops = 0
        job = training_job(config=TrainingConfig(progress_timeout_s=60, time_limit_s=600))
        self.monitor = RunMonitor(self.run, job, lambda metrics: self.epochs.append(metrics.epoch))

    def monotonic(self) -> float:
        return self.now

    def stop(self) -> None:
        self.num_stops += 1

    def look(self, later_s: float, **clock: object) -> None:
        """After some time, in which both ranks may have written where they are."""
        self.now += later_s
        for rank in (0, 1) if clock else ():
            write_clock(self.run.path, rank, doing="training", **clock)
        self.monitor.check_ranks(cast(RankGroup, self))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_silence_of_all_ranks_ends_the_run_and_tells_where_each_was(watched: Watched) -> None:
    for step in range(3):
        watched.look(50, epoch=2, step=step)
    with pytest.raises(
        TransientError,
        match=r"no rank has made progress for 61 s .*rank 0: training, epoch 2, step 2; rank 1: ",
    ):
        watched.look(61)


def test_the_ranks_left_behind_by_a_failed_one_are_stopped_after_a_while(watched: Watched) -> None:
    watched.exit_codes = {1: 1}
    for later_s, num_stops in ((0, 0), (SETTLE_S - 0.1, 0), (0.2, 1)):
        watched.look(later_s)
        assert watched.num_stops == num_stops


def test_an_attempt_that_takes_too_long_says_how_far_it_came(watched: Watched) -> None:
    watched.run.rewrite_epochs([epoch(0), epoch(1)])
    for step in range(13):
        watched.look(46, epoch=1, step=step)
    with pytest.raises(TrainingError, match=r"time_limit_s=600; it has done 2 epoch\(s\)"):
        watched.look(5)
    assert watched.epochs == [0, 1]


def test_the_rank_furthest_behind_tells_how_long_it_will_take(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        for step in range(0, 50, 10):
            for rank, ahead in enumerate((5, 0)):
                where = {"epoch": 0, "step": step + ahead, "num_steps_to_do": 100}
                write_clock(watched.run.path, rank, rows_per_s=500.0, **where)
            watched.look(10)
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
