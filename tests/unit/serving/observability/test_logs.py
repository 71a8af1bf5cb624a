"""The log: JSON lines with what belongs in them and nothing else."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.observability.config import LogConfig
from serving.observability.logs import Log, without_tokens

logger = logging.getLogger("serving.trial")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[Log, Path]]:
    file = tmp_path / "logs" / "serving.jsonl"
    made = Log(LogConfig(file=file, level="INFO"))
    yield made, file
    made.stop()


def lines(log: tuple[Log, Path]) -> list[dict[str, Any]]:
    log[0].stop()
    return [json.loads(line) for line in log[1].read_text().splitlines()]


def test_a_line_says_when_what_and_of_which_request(log: tuple[Log, Path]) -> None:
    told = {"request_id": "r-7", "model": "flight-delay", "version": "3", "subject": "ann"}
    logger.warning("a track moved to %s", "4", extra=told)
    logger.debug("not important enough")
    try:
        raise ValueError("broken with\ntwo lines")
    except ValueError:
        logger.exception("it failed")
    first, second = lines(log)
    assert first["message"] == "a track moved to 4"
    assert first["level"] == "warning"
    assert first["logger"] == "serving.trial"
    assert (first["request_id"], first["model"], first["version"]) == ("r-7", "flight-delay", "3")
    assert first["time"].endswith("+00:00")
    assert "subject" not in first
    assert "two lines" in second["error"]


def test_uvicorns_lines_are_of_the_same_form(log: tuple[Log, Path]) -> None:
    logging.getLogger("uvicorn.error").info("Started server process")
    assert [line["logger"] for line in lines(log)] == ["uvicorn.error"]


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
    made = Log(LogConfig(file=tmp_path / "log"))
    held, first = threading.Event(), threading.Event()
    write = made._target.emit

    def slow(record: logging.LogRecord) -> None:
        first.set()
        held.wait(20)
        write(record)

    monkeypatch.setattr(made._target, "emit", slow)
    logger.info("taken up")
    assert first.wait(20)
    for number in range(20):
        logger.info("line %d", number)
    assert made.counters() == {"dropped": 15}
    held.set()
    made.stop()
    assert len((tmp_path / "log").read_text().splitlines()) == 6
