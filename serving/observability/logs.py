"""The process's log: one JSON object a line, written by a thread of its own.

Lines bear what the caller gives with `extra=` (`request_id`, `model`, `version` and a few more).
Features, answers and what clients present to be known never belong in a line; what looks like a
token is taken out again before it is written.
"""

import json
import logging
import logging.handlers
import queue
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from serving.config import LogConfig

EXTRA = ("request_id", "model", "version", "variant", "slot", "hardware", "rows", "latency_ms",
         "reason", "status")  # fmt: skip
_TOKENS = re.compile(
    r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|\bfalaj_[0-9a-f]{12}_[\w-]{43}"
    r"|\b(authorization|x-api-key|api[_-]?key|token|password)(\"?\s*[:=]\s*\"?)"
    r"(?:(?:bearer|basic)\s+)?[^\s\"',;]+"
)
MOST_WAITING = 4096
"""Lines that wait to be written; more are dropped and counted."""


class LineFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time (UTC), level, logger, message, and what the record bears of `EXTRA`."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_tokens(record.getMessage()),
        }
        line |= {name: getattr(record, name) for name in EXTRA if hasattr(record, name)}
        if record.exc_info:
            line["error"] = without_tokens(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class BoundedHandler(logging.handlers.QueueHandler):
    """Hands records to a thread; counts what it drops where that cannot keep up."""

    num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """As it is: it stays in this process, and the writing thread makes its text."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Never waits."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1


class Writer(logging.handlers.QueueListener):
    """The writing thread; its end waits for a place in a full queue."""

    def enqueue_sentinel(self) -> None:
        """See the base class, which raises where the queue is full."""
        self.queue.put(None)  # type: ignore[attr-defined]


@contextmanager
def json_lines(config: LogConfig) -> Iterator[BoundedHandler]:
    """Write this process's log as JSON lines until the block ends, and then what waits."""
    target: logging.Handler = logging.StreamHandler(sys.stderr)
    if config.file is not None:
        config.file.parent.mkdir(parents=True, exist_ok=True)
        target = logging.handlers.WatchedFileHandler(config.file, encoding="utf-8")
    target.setFormatter(LineFormatter())
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(MOST_WAITING)
    handler, listener = BoundedHandler(lines), Writer(lines, target)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(config.level)
    listener.start()
    try:
        yield handler
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        listener.stop()
        target.close()
        if handler.num_dropped:
            root.warning("%d lines of the log were dropped", handler.num_dropped)


def without_tokens(text: str) -> str:
    """The text without what looks like a token or a password."""
    return _TOKENS.sub(lambda m: f"{m[2]}{m[3]}(removed)" if m[2] else "(token removed)", text)
