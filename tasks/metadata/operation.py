"""The database of operation: SQLite, or PostgreSQL that several hosts share.

Rooms that keep a record in it (the governor, releases) have tables of their own, and one way to
open it, to begin transactions and to ask for its clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Connection,
    DateTime,
    Dialect,
    Engine,
    Integer,
    MetaData,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool
from sqlalchemy.types import TypeDecorator

from tasks.kernel.errors import (
    ConfigurationError,
    StorageError,
    TransientError,
    refused_writes_explained,
)
from tasks.kernel.settings import make_folder

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


NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""Of a column that counts up; SQLite does so in INTEGER columns only."""


def open_database(url: str, tables: MetaData) -> Engine:
    """Open the database and make the tables that it lacks.

    Args:
        url: SQLAlchemy address, of SQLite or PostgreSQL (`postgresql://` takes psycopg).
        tables: of the room that opens it.

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
                make_folder(Path(address.database).parent)
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
        tables.create_all(connection)
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
