from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tasks.training.launch.rank_log import BURST_LINES, LINES_PER_S, RankLog


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
