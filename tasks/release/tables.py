"""The tables of releases, in the database of operation (SQLite or PostgreSQL)."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

from tasks.metadata import operation
from tasks.metadata.operation import NUMBER, UtcTime

metadata = MetaData()

releases = Table(
    "falaj_releases",
    metadata,
    Column("release_id", String(64), primary_key=True),
    Column("model", String(120), nullable=False),
    Column("stable", String(40), nullable=False),
    Column("candidate", String(40), nullable=False),
    Column("state", String(20), nullable=False),
    Column("step", Integer, nullable=False),
    Column("step_since", UtcTime, nullable=False),
    Column("opened_at", UtcTime, nullable=False),
    Column("opened_by", Text, nullable=False),
    Column("closed_at", UtcTime),
    Column("held_by", Text, nullable=False, default=""),
    Column("generation", Integer, nullable=False),
    Column("moved", Integer, nullable=False),
    Column("can_split", Boolean, nullable=False),
    Column("config", Text, nullable=False),
)
Index(
    "falaj_one_open_release",
    releases.c.model,
    unique=True,
    sqlite_where=releases.c.closed_at.is_(None),
    postgresql_where=releases.c.closed_at.is_(None),
)
periods = Table(
    "falaj_release_periods",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("release_id", ForeignKey("falaj_releases.release_id"), nullable=False, index=True),
    Column("step", Integer, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("until", UtcTime),
    Column("candidate", Float, nullable=False),
    Column("mirror", Float, nullable=False),
    Column("sticky", Boolean, nullable=False),
    Column("split", Boolean, nullable=False),
    sqlite_autoincrement=True,
    comment="Stretches of time in which the shares of one step held, from when they were set.",
)
entries = Table(
    "falaj_release_entries",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("release_id", ForeignKey("falaj_releases.release_id"), nullable=False, index=True),
    Column("at", UtcTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", String(20), nullable=False),
    Column("rule", String(40), nullable=False),
    Column("reason", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("evidence", Text),
    sqlite_autoincrement=True,
    comment="Every act of a person and every look; of looks that change nothing those that saw "
    "more, and the newest.",
)


def open_database(url: str) -> Engine:
    """Open the database of operation and make the tables of releases where it lacks them.

    Raises:
        ConfigurationError, TransientError, StorageError: as `operation.open_database`.
    """
    return operation.open_database(url, metadata)
