"""Every table of the control plane: retraining decisions, releases, and what runs took.

A change of a table comes with a migration in `migrations/versions`, and raises `VERSION`.
"""

from datetime import UTC, datetime

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

# The retraining controller: drift results ("verdicts"), drift incidents ("episodes"), the one
# action of each incident ("claims") and the record of decisions. Whoever decides about a model
# holds a lock on its row in `models`.
models = Table("falaj_governed", metadata, Column("model", String(120), primary_key=True))
drift_results = Table(
    "falaj_verdicts",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("verdict_id", String(64), nullable=False, unique=True, key="result_id"),
    Column("model", String(120), nullable=False),
    Column("use_case", String(120), nullable=False),
    Column("version", Integer, nullable=False),
    Column("verdict", String(20), nullable=False, key="result"),
    Column("window_end", UtcTime, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("answered_at", UtcTime),
    Column("num_asked", Integer, nullable=False, default=0),
    Index("falaj_verdicts_of", "model", "use_case", "answered_at"),
    sqlite_autoincrement=True,
)
incidents = Table(
    "falaj_episodes",
    metadata,
    Column("episode_id", String(64), primary_key=True),
    Column("model", String(120), nullable=False),
    Column("use_case", String(120), nullable=False),
    Column("version", Integer, nullable=False),
    Column("cause", String(20), nullable=False),
    Column("opened_by", ForeignKey("falaj_verdicts.result_id"), nullable=False),
    Column("newest", ForeignKey("falaj_verdicts.result_id"), nullable=False),
    Column("opened_at", UtcTime, nullable=False),
    Column("closed_at", UtcTime),
    Column("closed_by", Text),
)
Index(
    "falaj_one_open_episode",
    incidents.c.model,
    incidents.c.use_case,
    incidents.c.cause,
    unique=True,
    sqlite_where=incidents.c.closed_at.is_(None),
    postgresql_where=incidents.c.closed_at.is_(None),
)
actions = Table(
    "falaj_claims",
    metadata,
    Column("episode_id", ForeignKey("falaj_episodes.episode_id"), primary_key=True),
    Column("model", String(120), nullable=False),
    Column("use_case", String(120), nullable=False),
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
decisions = Table(
    "falaj_decisions",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("decided_at", UtcTime, nullable=False),
    Column("model", String(120), nullable=False),
    Column("use_case", String(120), nullable=False),
    Column("verdict_id", ForeignKey("falaj_verdicts.result_id"), nullable=False, key="result_id"),
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
)

# What each flow run took, without the runs inside it: a row a run and process, so that sums count
# nothing twice. `root_id` is the outermost run. The row is renewed while the run lasts.
uses = Table(
    "falaj_uses",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("run_id", String(80), nullable=False),
    Column("root_id", String(80), nullable=False, index=True),
    Column("flow", String(80), nullable=False),
    Column("use_case", String(120), nullable=False),
    Column("model", String(120), nullable=False),
    Column("owner", String(120), nullable=False),
    Column("hardware_class", String(63), nullable=False),
    Column("state", String(20), nullable=False),
    Column("started", UtcTime, nullable=False, index=True),
    Column("ended", UtcTime, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("cpu_s", Double, nullable=False),
    Column("gpu_s", Double, nullable=False),
    Column("joules", Double),
    Column("estimated", Boolean, nullable=False),
    Column("amount", Double),
    Column("currency", String(3), nullable=False),
    sqlite_autoincrement=True,
)
