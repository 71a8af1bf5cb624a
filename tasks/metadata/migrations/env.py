"""Run by Alembic; the connection and its transaction are those of `tasks.metadata.database`.

A new migration: `alembic` needs no command line here. Add `versions/v<number>_<what>.py` with
`upgrade()`, change `tables.py` alike and raise `VERSION`; a test compares both.
"""

from __future__ import annotations

from alembic import context

from tasks.metadata.tables import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
