"""The lineage files of an installation: JSON lines, a file a day, only ever appended to.

`events-<day>.jsonl` holds the events, `runs.txt` the id of every finished step in them. The ids are
written after the events: whoever is killed in between writes some events twice, under the same run
ids, which OpenLineage's readers take as one.

Which raw tables a query of the feature repository reads, found by DuckDB's own parser.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.files import append_lines, locked, write_atomically
from tasks.lineage.steps import Query

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
        with refused_writes_explained(self.folder), locked(self.folder / LOCK):
            yield

    def known_runs(self) -> frozenset[str]:
        """Ids of the steps that are wholly written."""
        try:
            return frozenset((self.folder / RUNS).read_text(errors="replace").split())
        except FileNotFoundError:
            return frozenset()

    def append(self, events: Sequence[Event], runs: Sequence[str] = ()) -> None:
        """Write events, then the ids of the steps that they complete."""
        if events:
            name = f"events-{datetime.now(UTC):%Y-%m-%d}.jsonl"
            append_lines(self.folder / name, [json.dumps(each, sort_keys=True) for each in events])
        if runs:
            append_lines(self.folder / RUNS, runs)

    def events(self) -> Iterator[Event]:
        """All events, oldest first. Spoilt lines are passed over; a warning counts them."""
        for file in sorted(self.folder.glob(PATTERN)):
            yield from _events_in(file)

    @property
    def outbox(self) -> list[Event]:
        """Events that a collector has not taken yet."""
        file = self.folder / OUTBOX
        return list(_events_in(file)) if file.exists() else []

    def keep_in_outbox(self, events: Sequence[Event]) -> None:
        """Replace what waits for the collector."""
        if events or (self.folder / OUTBOX).exists():
            text = "".join(json.dumps(event, sort_keys=True) + "\n" for event in events)
            write_atomically(self.folder / OUTBOX, text)


def _events_in(file: Path) -> Iterator[Event]:
    """Events of one file. A line that was cut off, or is no JSON object, is none."""
    spoilt: list[int] = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            event = json.loads(line.decode())
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            yield event
        else:
            spoilt.append(number)
    if spoilt:
        logger.warning(
            "%s: %d line(s) are cut off or spoilt and were passed over, the first is line %d",
            file.name,
            len(spoilt),
            spoilt[0],
        )


def queries_with_reads(
    texts: Mapping[str, str], staging: Mapping[str, str], raw: frozenset[str]
) -> dict[str, Query]:
    """Each query with the raw tables that it reads, directly or through staging queries.

    Args:
        texts: name to SQL; what DuckDB cannot parse is taken to read every raw table.
        staging: name of each staging table to its SQL.
        raw: names of the raw tables.
    """
    with duckdb.connect() as con:
        direct = {name: _tables(con, text) for name, text in staging.items()}
        return {
            name: Query(text, tuple(sorted(_reach(_tables(con, text), direct, raw))))
            for name, text in texts.items()
        }


def _tables(con: duckdb.DuckDBPyConnection, text: str) -> frozenset[str] | None:
    """Every table name in a query, those of its own `WITH` clauses too; None where it is no query.

    A `WITH` clause that bears the name of a raw table hides it, and may well read it; counting it
    as read errs on the safe side.
    """
    parsed = json.loads(con.execute("SELECT json_serialize_sql(?)", [text]).fetchall()[0][0])
    return None if parsed["error"] else frozenset(_names(parsed["statements"]))


def _names(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if tree.get("type") == "BASE_TABLE":
            yield tree["table_name"]
        for part in tree.values():
            yield from _names(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from _names(part)


def _reach(
    names: frozenset[str] | None,
    staging: Mapping[str, frozenset[str] | None],
    raw: frozenset[str],
) -> frozenset[str]:
    found: set[str] = set()
    seen: set[str] = set()
    queue: list[frozenset[str] | None] = [names]
    while queue:
        read = queue.pop()
        if read is None:
            return raw
        found |= read & raw
        queue += [staging[name] for name in read - seen if name in staging]
        seen |= read
    return frozenset(found)
