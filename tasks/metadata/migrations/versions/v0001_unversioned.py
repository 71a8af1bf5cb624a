"""The tables as of releases that counted no versions; those that exist are kept."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None

_TYPES = {
    "sqlite": {
        "number": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
        "moment": "DATETIME",
        "double": "DOUBLE",
    },
    "postgresql": {
        "number": "BIGSERIAL PRIMARY KEY",
        "moment": "TIMESTAMP WITH TIME ZONE",
        "double": "DOUBLE PRECISION",
    },
}


def upgrade() -> None:
    """Make the tables that are missing."""
    text = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    statements = text.format_map(_TYPES[op.get_context().dialect.name]).split(";\n")
    for statement in filter(None, map(str.strip, statements)):
        op.execute(statement)
