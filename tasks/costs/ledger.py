"""The ledger of what runs took: written while they last, read for sums."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tasks.contracts.base import Contract
from tasks.contracts.telemetry import ResourceUse
from tasks.metadata import database
from tasks.metadata.tables import uses


class Entry(Contract):
    """What one flow run took in one process, without the runs inside it."""

    run_id: str
    root_id: str
    """Of the outermost run that it is a part of."""
    flow: str
    use_case: str
    model: str
    owner: str
    hardware_class: str
    state: str
    """`running`, or how it ended. One that was killed stays `running`."""
    started: datetime
    ended: datetime
    """Or when the entry was last renewed."""
    use: ResourceUse


class CostLedger:
    """The table of uses in the metadata database.

    Args:
        url: SQLAlchemy address of SQLite or PostgreSQL.

    Raises:
        ConfigurationError: the address is of another kind.
        TransientError: the database does not answer; of every method too.
        StorageError: its disk refuses; of every method too.
    """

    def __init__(self, url: str) -> None:
        self._engine = database.open_database(url)

    def write(self, entries: Sequence[tuple[Entry, int | None]]) -> list[int]:
        """Add entries, or renew those with a number; returns their numbers."""
        numbers = []
        with database.transaction(self._engine) as connection:
            for entry, number in entries:
                values = entry.model_dump(exclude={"use"}) | entry.use.model_dump()
                renewal = sa.update(uses).where(uses.c.number == number)
                change = sa.insert(uses) if number is None else renewal
                made = connection.execute(change.values(values).returning(uses.c.number))
                numbers.append(int(made.scalar_one()))
        return numbers

    def entries(self, since: datetime) -> list[Entry]:
        """All that started at a moment or later, the oldest first."""
        query = sa.select(uses).where(uses.c.started >= since).order_by(uses.c.started)
        with database.transaction(self._engine, reads_only=True) as connection:
            rows = connection.execute(query).mappings().all()
        return [
            Entry(**_named(row, Entry), use=ResourceUse(**_named(row, ResourceUse))) for row in rows
        ]


def _named(row: sa.RowMapping, kind: type[Contract]) -> dict[str, Any]:
    return {name: row[name] for name in kind.model_fields if name in row}
