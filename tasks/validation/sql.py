"""Names and values in SQL texts."""

from __future__ import annotations

from datetime import UTC, datetime


def quoted(name: str) -> str:
    """A column or table name that no character of it can end."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: object) -> str:
    """A value: numbers and truth values plainly, moments in UTC, all else as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime):
        return f"TIMESTAMPTZ '{value.astimezone(UTC).isoformat()}'"
    return "'" + str(value).replace("'", "''") + "'"
