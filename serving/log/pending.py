"""Tables that wait to be written, by model, version and day."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date

import pyarrow as pa

Key = tuple[str, str, date]
"""Model, version and UTC day: the rows of one part."""


@dataclass(slots=True)
class _Waiting:
    tables: list[pa.Table] = field(default_factory=list)
    num_rows: int = 0
    num_bytes: int = 0


class Pending:
    """Rows that are tables already; one thread uses it."""

    def __init__(self) -> None:
        self._waiting: dict[Key, _Waiting] = {}
        self.num_rows = 0
        self.since = 0.0
        """When the oldest row was added, on the caller's clock; of no meaning without rows."""

    def add(self, key: Key, table: pa.Table, now: float) -> int:
        """Keep a table; its bytes."""
        if not self.num_rows:
            self.since = now
        waiting = self._waiting.setdefault(key, _Waiting())
        waiting.tables.append(table)
        waiting.num_rows += table.num_rows
        waiting.num_bytes += table.nbytes
        self.num_rows += table.num_rows
        return int(table.nbytes)

    def keys(self) -> list[Key]:
        """What waits, oldest day first."""
        return sorted(self._waiting, key=lambda key: (key[2], key[0], key[1]))

    def num_rows_of(self, key: Key) -> int:
        """Rows of one part."""
        return self._waiting[key].num_rows

    def table(self, key: Key) -> pa.Table:
        """All rows of one part, in the order in which they were added."""
        tables = self._waiting[key].tables
        if len(tables) == 1:
            return tables[0].unify_dictionaries()
        return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()

    def done(self, key: Key) -> int:
        """Let go of a part that was written or given up; its bytes."""
        waiting = self._waiting.pop(key)
        self.num_rows -= waiting.num_rows
        return waiting.num_bytes
