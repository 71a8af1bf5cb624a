"""Logs that do not grow for ever."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def rotate(log: Path, limit_bytes: int, keep: int) -> bool:
    """Move a log that is too large aside, while the process that writes it goes on.

    The process holds the file open for appending, so the content is copied and the file emptied.
    What is written between the last look and the emptying, some microseconds, is lost.

    Args:
        log: the file; `<name>.1` is the newest of its rotated files.
        limit_bytes: size at which it is rotated.
        keep: rotated files that are kept.

    Returns:
        True where it was rotated.
    """
    try:
        if log.stat().st_size < limit_bytes:
            return False
    except FileNotFoundError:
        return False
    for number in range(keep - 1, 0, -1):
        older = _numbered(log, number)
        if older.exists():
            older.replace(_numbered(log, number + 1))
    with log.open("r+b") as source, _numbered(log, 1).open("wb") as target:
        while True:
            shutil.copyfileobj(source, target)
            if source.tell() >= os.fstat(source.fileno()).st_size:
                source.truncate(0)
                return True


def tail(log: Path, lines: int, most_bytes: int = 64_000, since: int = 0) -> list[str]:
    """The last lines of a log, from `since` bytes on; none where there is no log yet."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(since, log.stat().st_size - most_bytes))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def _numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
