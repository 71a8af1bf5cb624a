"""The governor's tables, in the database of operation."""

from __future__ import annotations

from sqlalchemy import (
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

governed = Table(
    "falaj_governed",
    metadata,
    Column("model", String(120), primary_key=True),
    comment="One row a model; whoever decides about it holds a lock on the row.",
)
verdicts = Table(
    "falaj_verdicts",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("verdict_id", String(64), nullable=False, unique=True),
    Column("model", String(120), nullable=False),
    Column("use_case", String(120), nullable=False),
    Column("version", Integer, nullable=False),
    Column("verdict", String(20), nullable=False),
    Column("window_end", UtcTime, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("answered_at", UtcTime),
    Column("num_asked", Integer, nullable=False, default=0),
    Index("falaj_verdicts_of", "model", "use_case", "answered_at"),
    sqlite_autoincrement=True,
)
episodes = Table(
    "falaj_episodes",
    metadata,
    Column("episode_id", String(64), primary_key=True),
    Column("model", String(120), nullable=False),
    Column("use_case", String(120), nullable=False),
    Column("version", Integer, nullable=False),
    Column("cause", String(20), nullable=False),
    Column("opened_by", ForeignKey("falaj_verdicts.verdict_id"), nullable=False),
    Column("newest", ForeignKey("falaj_verdicts.verdict_id"), nullable=False),
    Column("opened_at", UtcTime, nullable=False),
    Column("closed_at", UtcTime),
    Column("closed_by", Text),
)
Index(
    "falaj_one_open_episode",
    episodes.c.model,
    episodes.c.use_case,
    episodes.c.cause,
    unique=True,
    sqlite_where=episodes.c.closed_at.is_(None),
    postgresql_where=episodes.c.closed_at.is_(None),
)
claims = Table(
    "falaj_claims",
    metadata,
    Column("episode_id", ForeignKey("falaj_episodes.episode_id"), primary_key=True),
    Column("model", String(120), nullable=False),
    Column("use_case", String(120), nullable=False),
    Column("action", String(20), nullable=False),
    Column("verdict_id", ForeignKey("falaj_verdicts.verdict_id"), nullable=False),
    Column("reason", Text, nullable=False),
    Column("state", String(20), nullable=False),
    Column("claimed_at", UtcTime, nullable=False),
    Column("claimed_by", Text, nullable=False),
    Column("kind", String(20)),
    Column("place", Text),
    Column("run_id", String(80)),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    Column("run_state", String(40)),
    Column("run_seconds", Float),
    Column("num_starts", Integer, nullable=False, default=0),
    Column("trouble", Text),
    Index("falaj_claims_of", "model", "use_case", "state"),
)
claim_clocks = Table(
    "falaj_claim_clocks",
    metadata,
    Column("episode_id", ForeignKey("falaj_claims.episode_id"), primary_key=True),
    Column("boot", String(64), nullable=False),
    Column("uptime_s", Float(53), nullable=False),
    comment="When a claim was made, by the clock of its machine's boot, which nobody can set.",
)
decisions = Table(
    "falaj_decisions",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("decided_at", UtcTime, nullable=False),
    Column("model", String(120), nullable=False),
    Column("use_case", String(120), nullable=False),
    Column("verdict_id", ForeignKey("falaj_verdicts.verdict_id"), nullable=False),
    Column("episode_id", ForeignKey("falaj_episodes.episode_id")),
    Column("cause", String(20)),
    Column("action", String(20), nullable=False),
    Column("carried_out_as", String(20)),
    Column("rule", Integer, nullable=False),
    Column("outcome", String(20), nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Index("falaj_decisions_of", "model", "use_case", "number"),
    sqlite_autoincrement=True,
)


def open_database(url: str) -> Engine:
    """Open the database of operation and make the governor's tables where it lacks them.

    Raises:
        ConfigurationError, TransientError, StorageError: as `operation.open_database`.
    """
    return operation.open_database(url, metadata)
