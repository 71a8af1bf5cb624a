"""The log: JSON lines with what belongs in them and nothing else."""

import json
import logging
import logging.handlers
import threading
from pathlib import Path
from typing import Any

import pytest

from serving.config import LogConfig
from serving.observability.logs import json_lines, without_tokens

logger = logging.getLogger("serving.trial")


def test_a_line_says_when_what_and_of_which_request(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "serving.jsonl"
    told = {"request_id": "r-7", "model": "flight-delay", "version": "3", "subject": "ann"}
    with json_lines(LogConfig(file=file, level="INFO")):
        logger.warning("a track moved to %s", "4", extra=told)
        logger.debug("not important enough")
        try:
            raise ValueError("broken with\ntwo lines")
        except ValueError:
            logger.exception("it failed")
    first, second = map(json.loads, file.read_text().splitlines())
    assert first["message"] == "a track moved to 4"
    assert first["level"] == "warning"
    assert first["logger"] == "serving.trial"
    assert (first["request_id"], first["model"], first["version"]) == ("r-7", "flight-delay", "3")
    assert first["time"].endswith("+00:00")
    assert "subject" not in first
    assert "two lines" in second["error"]


@pytest.mark.parametrize(
    "secret",
    [
        "falaj_0123456789ab_abcdefghijklmnop" + "-A_" * 9,
        "Authorization: Bearer abcdefghijklmnop.qrst",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdefghijklmnop",
        "x-api-key: abcdefghijklmnop",
        'token="abcdefghijklmnop"',
        "password=abcdefghijklmnop",
    ],
)
def test_what_looks_like_a_token_is_taken_out(secret: str) -> None:
    cleaned = without_tokens(f"refused {secret} for good")
    assert "abcdefghijklmnop" not in cleaned
    assert cleaned.startswith("refused")
    assert cleaned.endswith("for good")


def test_lines_that_cannot_be_written_in_time_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.observability.logs.MOST_WAITING", 5)
    held, first = threading.Event(), threading.Event()
    write = logging.handlers.WatchedFileHandler.emit

    def slow(handler: Any, record: logging.LogRecord) -> None:
        first.set()
        held.wait(20)
        write(handler, record)

    monkeypatch.setattr(logging.handlers.WatchedFileHandler, "emit", slow)
    with json_lines(LogConfig(file=tmp_path / "log")) as handler:
        logger.info("taken up")
        assert first.wait(20)
        for number in range(20):
            logger.info("line %d", number)
        assert handler.num_dropped == 15
        held.set()
    assert len((tmp_path / "log").read_text().splitlines()) == 6
