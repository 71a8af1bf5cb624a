"""Every table of the control plane: retraining decisions, releases, and what runs took.

A change of a table comes with a migration in `migrations/versions`, and raises `VERSION`.
"""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

from tasks.kernel.values import in_utc

VERSION = "0005"
"""Of the newest migration."""
VERSION_TABLE = "falaj_schema"
RESULT = "falaj_verdicts.result_id"


class UtcTime(TypeDecorator[datetime]):
    """A moment in UTC; SQLite, which has no zones, keeps it without one."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """The moment in UTC."""
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """The moment with its zone."""
        return value and in_utc(value)


NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""Of a column that counts up; SQLite does so in INTEGER columns only."""

metadata = sa.MetaData()


def _counted(name: str, *parts: sa.schema.SchemaItem) -> sa.Table:
    """A table whose rows are numbered as they come."""
    number = sa.Column("number", NUMBER, primary_key=True, autoincrement=True)
    return sa.Table(name, metadata, number, *parts, sqlite_autoincrement=True)


def _needed(kind: Any, *names: str) -> list[sa.Column[Any]]:
    """Columns of one type that are filled in every row."""
    return [sa.Column(name, kind, nullable=False) for name in names]


def _one_open(name: str, *columns: sa.Column[str]) -> None:
    """Let no two rows have the same values of these columns unless all but one are closed."""
    is_open = columns[0].table.c.closed_at.is_(None)
    sa.Index(name, *columns, unique=True, sqlite_where=is_open, postgresql_where=is_open)


# The retraining controller: drift results ("verdicts"), drift incidents ("episodes"), the one
# action of each incident ("claims") and the record of decisions. Whoever decides about a model
# holds a lock on its row in `models`.
models = sa.Table("falaj_governed", metadata, sa.Column("model", sa.String(120), primary_key=True))
drift_results = _counted(
    "falaj_verdicts",
    sa.Column("verdict_id", sa.String(64), nullable=False, unique=True, key="result_id"),
    *_needed(sa.String(120), "model", "use_case"),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("verdict", sa.String(20), nullable=False, key="result"),
    sa.Column("window_end", UtcTime, nullable=False),
    *_needed(sa.Text, "evidence", "policy"),
    sa.Column("stored_at", UtcTime, nullable=False),
    sa.Column("answered_at", UtcTime),
    sa.Column("num_asked", sa.Integer, nullable=False, default=0),
    sa.Index("falaj_verdicts_of", "model", "use_case", "answered_at"),
)
incidents = sa.Table(
    "falaj_episodes",
    metadata,
    sa.Column("episode_id", sa.String(64), primary_key=True),
    *_needed(sa.String(120), "model", "use_case"),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("cause", sa.String(20), nullable=False),
    sa.Column("opened_by", sa.ForeignKey(RESULT), nullable=False),
    sa.Column("newest", sa.ForeignKey(RESULT), nullable=False),
    sa.Column("opened_at", UtcTime, nullable=False),
    sa.Column("closed_at", UtcTime),
    sa.Column("closed_by", sa.Text),
)
_one_open("falaj_one_open_episode", incidents.c.model, incidents.c.use_case, incidents.c.cause)
actions = sa.Table(
    "falaj_claims",
    metadata,
    sa.Column("episode_id", sa.ForeignKey("falaj_episodes.episode_id"), primary_key=True),
    *_needed(sa.String(120), "model", "use_case"),
    sa.Column("action", sa.String(20), nullable=False),
    sa.Column("verdict_id", sa.ForeignKey(RESULT), nullable=False, key="result_id"),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("claimed_at", UtcTime, nullable=False),
    sa.Column("claimed_by", sa.Text, nullable=False),
    sa.Column("kind", sa.String(20)),
    sa.Column("place", sa.Text),
    sa.Column("run_id", sa.String(80)),
    sa.Column("started_at", UtcTime),
    sa.Column("ended_at", UtcTime),
    sa.Column("run_state", sa.String(40)),
    sa.Column("run_seconds", sa.Float),
    sa.Column("num_starts", sa.Integer, nullable=False, default=0),
    sa.Column("trouble", sa.Text),
    # When it was claimed, by the clock of its machine's boot, which nobody can set.
    sa.Column("boot", sa.String(64)),
    sa.Column("uptime_s", sa.Double),
    sa.Index("falaj_claims_of", "model", "use_case", "state"),
)
decisions = _counted(
    "falaj_decisions",
    sa.Column("decided_at", UtcTime, nullable=False),
    *_needed(sa.String(120), "model", "use_case"),
    sa.Column("verdict_id", sa.ForeignKey(RESULT), nullable=False, key="result_id"),
    sa.Column("episode_id", sa.ForeignKey("falaj_episodes.episode_id")),
    sa.Column("cause", sa.String(20)),
    sa.Column("action", sa.String(20), nullable=False),
    sa.Column("carried_out_as", sa.String(20)),
    sa.Column("rule", sa.Integer, nullable=False),
    sa.Column("outcome", sa.String(20), nullable=False),
    *_needed(sa.Text, "reason", "actor"),
    sa.Index("falaj_decisions_of", "model", "use_case", "number"),
)

# One row: a random name that was given to this database.
identities = sa.Table(
    "falaj_identity",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("identity", sa.String(64), nullable=False),
)

# Releases: `periods` are stretches of time in which the shares of one step held. `entries` are all
# acts of people and evaluation cycles; of cycles that change nothing those that saw more, and the
# newest.
releases = sa.Table(
    "falaj_releases",
    metadata,
    sa.Column("release_id", sa.String(64), primary_key=True),
    sa.Column("model", sa.String(120), nullable=False),
    *_needed(sa.String(40), "stable", "candidate"),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    *_needed(UtcTime, "step_since", "opened_at"),
    sa.Column("opened_by", sa.Text, nullable=False),
    sa.Column("closed_at", UtcTime),
    sa.Column("held_by", sa.Text, nullable=False, default=""),
    *_needed(sa.Integer, "generation", "moved"),
    sa.Column("can_split", sa.Boolean, nullable=False),
    sa.Column("config", sa.Text, nullable=False),
)
_one_open("falaj_one_open_release", releases.c.model)
periods = _counted(
    "falaj_release_periods",
    sa.Column("release_id", sa.ForeignKey("falaj_releases.release_id"), nullable=False, index=True),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("since", UtcTime, nullable=False),
    sa.Column("until", UtcTime),
    *_needed(sa.Float, "candidate", "mirror"),
    *_needed(sa.Boolean, "sticky", "split"),
)
entries = _counted(
    "falaj_release_entries",
    sa.Column("release_id", sa.ForeignKey("falaj_releases.release_id"), nullable=False, index=True),
    sa.Column("at", UtcTime, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("action", sa.String(20), nullable=False),
    sa.Column("rule", sa.String(40), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    *_needed(sa.Integer, "step", "generation"),
    sa.Column("evidence", sa.Text),
)

# What each flow run took, without the runs inside it: a row a run and process, so that sums count
# nothing twice. `root_id` is the outermost run. The row is renewed while the run lasts.
uses = _counted(
    "falaj_uses",
    sa.Column("run_id", sa.String(80), nullable=False),
    sa.Column("root_id", sa.String(80), nullable=False, index=True),
    sa.Column("flow", sa.String(80), nullable=False),
    *_needed(sa.String(120), "use_case", "model", "owner"),
    sa.Column("hardware_class", sa.String(63), nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("started", UtcTime, nullable=False, index=True),
    sa.Column("ended", UtcTime, nullable=False),
    *_needed(sa.Double, "seconds", "cpu_s", "gpu_s"),
    sa.Column("joules", sa.Double),
    sa.Column("estimated", sa.Boolean, nullable=False),
    sa.Column("amount", sa.Double),
    sa.Column("currency", sa.String(3), nullable=False),
)
