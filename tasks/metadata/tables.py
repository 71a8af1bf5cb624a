"""Every table of the control plane: retraining decisions, releases, and what runs took.

A change of a table comes with a migration in `migrations/versions`, and raises `VERSION`.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Double,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeDecorator

from tasks.kernel.values import in_utc

VERSION = "0005"
"""Of the newest migration."""
VERSION_TABLE = "falaj_schema"


class UtcTime(TypeDecorator[datetime]):
    """A moment in UTC; SQLite, which has no zones, keeps it without one."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The moment in UTC."""
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The moment with its zone."""
        return value and in_utc(value)


NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""Of a column that counts up; SQLite does so in INTEGER columns only."""

metadata = MetaData()


def _counted(name: str, *parts: SchemaItem) -> Table:
    """A table whose rows are numbered as they come."""
    number = Column("number", NUMBER, primary_key=True, autoincrement=True)
    return Table(name, metadata, number, *parts, sqlite_autoincrement=True)


def _needed(kind: Any, *names: str) -> list[Column[Any]]:
    """Columns of one type that are filled in every row."""
    return [Column(name, kind, nullable=False) for name in names]


def _one_open(name: str, *columns: Column[str]) -> None:
    """Let no two rows have the same values of these columns unless all but one are closed."""
    is_open = columns[0].table.c.closed_at.is_(None)
    Index(name, *columns, unique=True, sqlite_where=is_open, postgresql_where=is_open)


# The retraining controller: drift results ("verdicts"), drift incidents ("episodes"), the one
# action of each incident ("claims") and the record of decisions. Whoever decides about a model
# holds a lock on its row in `models`.
models = Table("falaj_governed", metadata, Column("model", String(120), primary_key=True))
drift_results = _counted(
    "falaj_verdicts",
    Column("verdict_id", String(64), nullable=False, unique=True, key="result_id"),
    *_needed(String(120), "model", "use_case"),
    Column("version", Integer, nullable=False),
    Column("verdict", String(20), nullable=False, key="result"),
    Column("window_end", UtcTime, nullable=False),
    *_needed(Text, "evidence", "policy"),
    Column("stored_at", UtcTime, nullable=False),
    Column("answered_at", UtcTime),
    Column("num_asked", Integer, nullable=False, default=0),
    Index("falaj_verdicts_of", "model", "use_case", "answered_at"),
)
incidents = Table(
    "falaj_episodes",
    metadata,
    Column("episode_id", String(64), primary_key=True),
    *_needed(String(120), "model", "use_case"),
    Column("version", Integer, nullable=False),
    Column("cause", String(20), nullable=False),
    Column("opened_by", ForeignKey("falaj_verdicts.result_id"), nullable=False),
    Column("newest", ForeignKey("falaj_verdicts.result_id"), nullable=False),
    Column("opened_at", UtcTime, nullable=False),
    Column("closed_at", UtcTime),
    Column("closed_by", Text),
)
_one_open("falaj_one_open_episode", incidents.c.model, incidents.c.use_case, incidents.c.cause)
actions = Table(
    "falaj_claims",
    metadata,
    Column("episode_id", ForeignKey("falaj_episodes.episode_id"), primary_key=True),
    *_needed(String(120), "model", "use_case"),
    Column("action", String(20), nullable=False),
    Column("verdict_id", ForeignKey("falaj_verdicts.result_id"), nullable=False, key="result_id"),
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
    # When it was claimed, by the clock of its machine's boot, which nobody can set.
    Column("boot", String(64)),
    Column("uptime_s", Double),
    Index("falaj_claims_of", "model", "use_case", "state"),
)
decisions = _counted(
    "falaj_decisions",
    Column("decided_at", UtcTime, nullable=False),
    *_needed(String(120), "model", "use_case"),
    Column("verdict_id", ForeignKey("falaj_verdicts.result_id"), nullable=False, key="result_id"),
    Column("episode_id", ForeignKey("falaj_episodes.episode_id")),
    Column("cause", String(20)),
    Column("action", String(20), nullable=False),
    Column("carried_out_as", String(20)),
    Column("rule", Integer, nullable=False),
    Column("outcome", String(20), nullable=False),
    *_needed(Text, "reason", "actor"),
    Index("falaj_decisions_of", "model", "use_case", "number"),
)

# One row: a random name that was given to this database.
identities = Table(
    "falaj_identity",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("identity", String(64), nullable=False),
)

# Releases: `periods` are stretches of time in which the shares of one step held. `entries` are all
# acts of people and evaluation cycles; of cycles that change nothing those that saw more, and the
# newest.
releases = Table(
    "falaj_releases",
    metadata,
    Column("release_id", String(64), primary_key=True),
    Column("model", String(120), nullable=False),
    *_needed(String(40), "stable", "candidate"),
    Column("state", String(20), nullable=False),
    Column("step", Integer, nullable=False),
    *_needed(UtcTime, "step_since", "opened_at"),
    Column("opened_by", Text, nullable=False),
    Column("closed_at", UtcTime),
    Column("held_by", Text, nullable=False, default=""),
    *_needed(Integer, "generation", "moved"),
    Column("can_split", Boolean, nullable=False),
    Column("config", Text, nullable=False),
)
_one_open("falaj_one_open_release", releases.c.model)
periods = _counted(
    "falaj_release_periods",
    Column("release_id", ForeignKey("falaj_releases.release_id"), nullable=False, index=True),
    Column("step", Integer, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("until", UtcTime),
    *_needed(Float, "candidate", "mirror"),
    *_needed(Boolean, "sticky", "split"),
)
entries = _counted(
    "falaj_release_entries",
    Column("release_id", ForeignKey("falaj_releases.release_id"), nullable=False, index=True),
    Column("at", UtcTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", String(20), nullable=False),
    Column("rule", String(40), nullable=False),
    Column("reason", Text, nullable=False),
    *_needed(Integer, "step", "generation"),
    Column("evidence", Text),
)

# What each flow run took, without the runs inside it: a row a run and process, so that sums count
# nothing twice. `root_id` is the outermost run. The row is renewed while the run lasts.
uses = _counted(
    "falaj_uses",
    Column("run_id", String(80), nullable=False),
    Column("root_id", String(80), nullable=False, index=True),
    Column("flow", String(80), nullable=False),
    *_needed(String(120), "use_case", "model", "owner"),
    Column("hardware_class", String(63), nullable=False),
    Column("state", String(20), nullable=False),
    Column("started", UtcTime, nullable=False, index=True),
    Column("ended", UtcTime, nullable=False),
    *_needed(Double, "seconds", "cpu_s", "gpu_s"),
    Column("joules", Double),
    Column("estimated", Boolean, nullable=False),
    Column("amount", Double),
    Column("currency", String(3), nullable=False),
)
