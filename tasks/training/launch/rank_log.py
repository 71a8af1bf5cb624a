"""Where the lines of the ranks go: whole into one file, and sparingly into the driver's log."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tasks.kernel.errors import refused_writes_explained

LOGGER = logging.getLogger(__name__)
LINES_PER_S = 2
# What may come at once before that rate holds: all that ranks say while they start.
BURST_LINES = 20
# How a rank's line says its level: our own lines with a word, Horovod's core with a letter behind
# the time. Any other line (a traceback, a library's print) is for the file alone.
LEVEL_PATTERN = re.compile(r"(?:(DEBUG|INFO|WARNING|ERROR) |\[[^]]*: ([WEF]) )")
LEVELS = {
    "DEBUG": logging.DEBUG,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.ERROR,
}


class RankLog:
    """Writes every line into a file and passes warnings, and few other lines, on to the log.

    Raises:
        StorageError: the disk refused a write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with refused_writes_explained(path):
            self._file = path.open("a", encoding="utf-8")
        self._started = self._refilled = time.monotonic()
        self._allowance = float(BURST_LINES)
        self._left_out = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._left_out:
            LOGGER.info("%d more lines of the ranks are in training.log", self._left_out)

    def note(self, line: str) -> None:
        """Write a line of the driver itself, into the file only."""
        with refused_writes_explained(self._path):
            self._file.write(f"{line}\n")
            self._file.flush()

    def add(self, rank: int | str, line: str) -> None:
        """Take one line that a rank printed; `rank` is its number, or its place in words."""
        who = f"rank {rank}" if isinstance(rank, int) else rank
        self.note(f"{time.monotonic() - self._started:8.1f} s  {who} | {line}")
        match = LEVEL_PATTERN.match(line)
        if match is None:
            return
        level = LEVELS.get(match[1] or match[2], logging.INFO)
        if level == logging.DEBUG:
            return
        if level == logging.INFO and self._is_over_rate():
            self._left_out += 1
            return
        LOGGER.log(level, "%s: %s", who, line[match.end() :] if match[1] else line)

    def _is_over_rate(self) -> bool:
        """A token bucket: refilled at the rate, and never fuller than the burst."""
        now = time.monotonic()
        earned = (now - self._refilled) * LINES_PER_S
        self._allowance = min(BURST_LINES, self._allowance + earned)
        self._refilled = now
        if self._allowance < 1:
            return True
        self._allowance -= 1
        return False
