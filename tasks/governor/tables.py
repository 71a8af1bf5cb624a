"""The governor's tables and their database: SQLite, or PostgreSQL that several hosts share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    Dialect,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool
from sqlalchemy.types import TypeDecorator

from tasks.errors import (
    ConfigurationError,
    StorageError,
    TransientError,
    refused_writes_explained,
)
from tasks.settings import PRIVATE_MODE

BUSY_TIMEOUT_MS = 60_000
CONNECT_TIMEOUT_S = 10
SCHEMA_LOCK = 0x46414C41  # any constant: whoever creates the tables holds it
READS_ONLY = "falaj_reads_only"
_REFUSED = ("readonly database", "unable to open database file", "disk is full", "disk I/O error")

_DAMAGED = ("file is not a database", "disk image is malformed")


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
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = MetaData()
_NUMBER = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up in INTEGER columns only

governed = Table(
    "falaj_governed",
    metadata,
    Column("model", String(120), primary_key=True),
    comment="One row a model; whoever decides about it holds a lock on the row.",
)
verdicts = Table(
    "falaj_verdicts",
    metadata,
    Column("number", _NUMBER, primary_key=True, autoincrement=True),
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
    Column("number", _NUMBER, primary_key=True, autoincrement=True),
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
    """Open the database and make the tables that it lacks.

    Args:
        url: SQLAlchemy address, of SQLite or PostgreSQL (`postgresql://` takes psycopg).

    Raises:
        ConfigurationError: the address is of another kind, or none.
        TransientError: the database does not answer, or was busy.
        StorageError: its disk refused.
    """
    try:
        address = make_url(url)
    except ArgumentError as exc:
        raise ConfigurationError(
            "FALAJ_DATABASE_URL is no database address; write it as "
            "postgresql://user:password@host/database, or leave it out for SQLite"
        ) from exc
    if address.get_backend_name() == "sqlite":
        if address.database:
            with refused_writes_explained(Path(address.database)):
                Path(address.database).parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_MODE)
        engine = create_engine(
            address, poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000}
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    elif address.get_backend_name() == "postgresql":
        engine = create_engine(
            address.set(drivername="postgresql+psycopg"),
            poolclass=NullPool,
            connect_args={"connect_timeout": CONNECT_TIMEOUT_S},
        )
    else:
        raise ConfigurationError(
            f"FALAJ_DATABASE_URL is of {address.get_backend_name()}; decisions are kept in SQLite "
            "or PostgreSQL"
        )
    with transaction(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": SCHEMA_LOCK})
        metadata.create_all(connection)
    return engine


@contextmanager
def transaction(engine: Engine, *, reads_only: bool = False) -> Iterator[Connection]:
    """One transaction, committed when the block ends and rolled back when it fails.

    On SQLite one that writes holds the write lock from its beginning, so what it reads stays so.

    Raises:
        TransientError: the database does not answer, or was busy.
        StorageError: its disk refused.
    """
    try:
        with engine.execution_options(**{READS_ONLY: reads_only}).begin() as connection:
            yield connection
    except DBAPIError as exc:
        raise _explained(exc, engine) from exc


def database_now(connection: Connection) -> datetime:
    """The database's clock, UTC; it goes on within a transaction."""
    if connection.dialect.name == "postgresql":
        moment = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        return UtcTime().process_result_value(moment, connection.dialect) or moment
    told = connection.execute(text("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')")).scalar_one()
    return datetime.fromisoformat(told).replace(tzinfo=UTC)


def _prepare_sqlite(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # SQLAlchemy begins transactions, see `_begin_sqlite`
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "journal_mode=WAL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    reads_only = connection.get_execution_options().get(READS_ONLY, False)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")


def _explained(exc: DBAPIError, engine: Engine) -> Exception:
    where = engine.url.render_as_string(hide_password=True)
    said = str(exc.orig).strip().splitlines()[0] if str(exc.orig).strip() else "no reason given"
    if any(sign in said for sign in _REFUSED):
        return StorageError(
            f"{where}: the disk refused ({said}); expected a writable file with free space. "
            "Nothing was changed; free space or mend the permissions and run again"
        )
    if any(sign in said for sign in _DAMAGED):
        return StorageError(
            f"{where} is damaged ({said}); expected the database of decisions. Restore it from a "
            "backup, or move it away to begin an empty record"
        )
    if isinstance(exc, OperationalError) or exc.connection_invalidated:
        return TransientError(
            f"{where} did not answer or was busy ({said}). Nothing was changed; it is tried again, "
            "and the sweep takes up what was left"
        )
    return exc
