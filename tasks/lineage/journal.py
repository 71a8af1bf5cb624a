"""The lineage files of an installation: JSON lines, a file a day, only ever appended to.

`events-<day>.jsonl` holds the events, `runs.txt` the id of every finished step in them. The ids are
written after the events: whoever is killed in between writes some events twice, under the same run
ids, which OpenLineage's readers take as one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.errors import refused_writes_explained
from tasks.settings import write_atomically

logger = logging.getLogger(__name__)

PATTERN = "events-*.jsonl"
RUNS, OUTBOX, LOCK = "runs.txt", "outbox.jsonl", "lock"
Event = dict[str, Any]


class Journal:
    """The lineage files under one folder; the folder is made by the first write.

    Args:
        folder: such as `.falaj/lineage`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the files against other processes that write them."""
        with refused_writes_explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield

    def known_runs(self) -> frozenset[str]:
        """Ids of the steps that are wholly written."""
        try:
            return frozenset((self.folder / RUNS).read_text().split())
        except FileNotFoundError:
            return frozenset()

    def append(self, events: Sequence[Event], runs: Sequence[str] = ()) -> None:
        """Write events, then the ids of the steps that they complete."""
        if events:
            name = f"events-{datetime.now(UTC):%Y-%m-%d}.jsonl"
            self._append(name, [json.dumps(event, sort_keys=True) for event in events])
        if runs:
            self._append(RUNS, runs)

    def events(self) -> Iterator[Event]:
        """All events, oldest first. A line that was cut off is passed over with a warning."""
        for file in sorted(self.folder.glob(PATTERN)):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    logger.warning("%s, line %d is cut off or spoilt", file.name, number)
                    continue
                yield event

    @property
    def outbox(self) -> list[Event]:
        """Events that a collector has not taken yet."""
        try:
            lines = (self.folder / OUTBOX).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def keep_in_outbox(self, events: Sequence[Event]) -> None:
        """Replace what waits for the collector."""
        if events or (self.folder / OUTBOX).exists():
            text = "".join(json.dumps(event, sort_keys=True) + "\n" for event in events)
            write_atomically(self.folder / OUTBOX, text)

    def _append(self, name: str, lines: Sequence[str]) -> None:
        path = self.folder / name
        with refused_writes_explained(path), path.open("ab+") as stream:
            stream.seek(0, os.SEEK_END)
            whole = "".join(f"{line}\n" for line in lines)
            if stream.tell() and not _ends_a_line(stream):  # a process was killed in a write
                whole = f"\n{whole}"
            stream.write(whole.encode())
            stream.flush()
            os.fsync(stream.fileno())


def _ends_a_line(stream: Any) -> bool:
    stream.seek(-1, os.SEEK_END)
    return bool(stream.read(1) == b"\n")
