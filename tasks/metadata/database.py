"""The metadata database: SQLite, or PostgreSQL that several hosts share.

One way to open it, to migrate it to the tables of this release, to begin transactions and to ask
for its clock. Every table is in `tables`.
"""

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, inspect, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.pool import NullPool

from tasks.kernel.errors import ConfigurationError, StorageError, TransientError
from tasks.kernel.files import locked, private_folder
from tasks.metadata.tables import VERSION, VERSION_TABLE

ANSWER_WITHIN_S = 60.0
"""Longest wait for locks; in PostgreSQL also for a statement."""
CONNECT_WITHIN_S = 10
# On both ends: the server is to notice a machine that is gone, or its locks would stay.
KEEP_ALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4}
LOCK_POLL_S = 0.1
SCHEMA_LOCK = 0x46414C41  # of PostgreSQL's advisory locks; whoever migrates holds it
USED = "used.lock"
"""File of the state folder; runs share its lock, and who may have no run beside it holds it."""
READS_ONLY = "falaj_reads_only"
MIGRATIONS = Path(__file__).with_name("migrations")
COPY = "before-migration-of-{}.db"
"""Name of the copy of a SQLite file; `{}` is the version of its tables."""
REFUSED = ("readonly database", "unable to open database file", "disk is full", "disk I/O error")
DAMAGED = ("file is not a database", "disk image is malformed")
"""What SQLite says where its disk refuses, and where its file is no whole database."""


def open_database(url: str) -> Engine:
    """Open the database, and bring its tables to this release's version.

    The engine has no pool: processes that fork may share it.

    Args:
        url: SQLAlchemy address, of a SQLite file or PostgreSQL (`postgresql://` takes psycopg).

    Raises:
        ConfigurationError: the address is of another kind, or a newer release made the database.
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
    if address.get_backend_name() == "postgresql":
        engine = server_engine(address)
    elif address.get_backend_name() == "sqlite" and address.database:
        private_folder(Path(address.database).parent)
        engine = _sqlite(address)
    else:
        raise ConfigurationError(
            f"FALAJ_DATABASE_URL is of {address.get_backend_name()}; expected PostgreSQL or the "
            "path of a SQLite file"
        )
    _migrate(engine)
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


@contextmanager
def held_everywhere(
    path: Path,
    *,
    shared: bool = False,
    wait_s: float = float("inf"),
    held: Callable[[], Exception] | None = None,
) -> Iterator[list[int]]:
    """Hold the lock of a file of the state folder against all machines that share the state.

    As `files.locked` on this machine; where `FALAJ_DATABASE_URL` names PostgreSQL, its advisory
    lock holds against the others. PostgreSQL frees it when the connection of this process ends, or
    answers no more for half a minute.

    Yields:
        Descriptors: a program that inherits them and takes this one's place holds the lock too.

    Raises:
        StorageError: the file cannot be made.
        TransientError: the database does not answer; or others held the lock, where `held` is None.
    """
    with locked(path, shared=shared, wait_s=wait_s, held=held) as here:
        url = os.environ.get("FALAJ_DATABASE_URL", "")
        if not url.startswith("postgres"):
            yield [here]
            return
        home = Path(os.environ.get("FALAJ_HOME", "/")).resolve()
        name = str(path.relative_to(home) if path.is_relative_to(home) else path)
        with advisory_lock(make_url(url), name, shared=shared, wait_s=wait_s, held=held) as there:
            yield [here, there]


@contextmanager
def advisory_lock(
    address: URL,
    name: str,
    *,
    shared: bool = False,
    wait_s: float = float("inf"),
    held: Callable[[], Exception] | None = None,
) -> Iterator[int]:
    """Hold PostgreSQL's lock of a name, which ends with this process's connection to it.

    Yields:
        Descriptor of the connection.

    Raises:
        TransientError: the database does not answer; or others held the lock, where `held` is None.
    """
    engine, deadline = server_engine(address), time.monotonic() + wait_s
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
    ask = text(f"SELECT pg_try_advisory_lock{'_shared' if shared else ''}(:key)")
    with ExitStack() as stack:
        try:
            connecting = engine.execution_options(isolation_level="AUTOCOMMIT")
            connection = stack.enter_context(connecting.connect())
            while not connection.execute(ask, {"key": key}).scalar_one():
                if time.monotonic() >= deadline:
                    late = f"another machine held {name} for {wait_s:g} s; try again"
                    raise held() if held else TransientError(late)
                time.sleep(LOCK_POLL_S)
        except DBAPIError as exc:
            raise _explained(exc, engine) from exc
        yield int(connection.connection.fileno())


def database_now(connection: Connection) -> datetime:
    """The database's clock, UTC; it goes on within a transaction."""
    if connection.dialect.name == "postgresql":
        moment: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        return moment.astimezone(UTC)
    shown = connection.execute(text("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')")).scalar_one()
    return datetime.fromisoformat(shown).replace(tzinfo=UTC)


def insert_if_absent(connection: Connection, table: Table, **values: Any) -> None:
    """Add a row, unless one with its key is there."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    connection.execute(insert(table).values(values).on_conflict_do_nothing())


def server_engine(address: URL) -> Engine:
    """Connections to PostgreSQL that end, with their locks, when either machine is gone."""
    limit_ms = int(ANSWER_WITHIN_S * 1000)
    given = address.query.get("options", "")
    limits = f"{given} -c statement_timeout={limit_ms} -c lock_timeout={limit_ms}"
    limits += "".join(f" -c tcp_{name}={value}" for name, value in KEEP_ALIVE.items())
    return create_engine(
        address.set(drivername="postgresql+psycopg").update_query_dict({"options": limits}),
        poolclass=NullPool,
        connect_args={"connect_timeout": CONNECT_WITHIN_S, **KEEP_ALIVE},
    )


def _sqlite(address: URL) -> Engine:
    """SQLite that takes the write lock at the start: a later wish for it would fail, not wait."""

    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        _write_ahead(connection, time.monotonic() + ANSWER_WITHIN_S)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    def begin(connection: Connection) -> None:
        reads_only = connection.get_execution_options().get(READS_ONLY, False)
        connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")

    engine = create_engine(address, poolclass=NullPool, connect_args={"timeout": ANSWER_WITHIN_S})
    event.listen(engine, "connect", prepare)
    event.listen(engine, "begin", begin)
    return engine


def _write_ahead(connection: Any, until_s: float) -> None:
    """Let readers and a writer not wait for each other; SQLite itself does not wait to set this."""
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def _migrate(engine: Engine) -> None:
    """Run the migrations that the database lacks, in one transaction and one process at a time."""
    with transaction(engine, reads_only=True) as connection:
        if _version(connection) == VERSION:
            return
    with transaction(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": SCHEMA_LOCK})
        version = _version(connection)
        if version == VERSION:
            return
        # Loaded here: a process that finds its tables as they should be needs no Alembic.
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory

        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        known = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
        if version is not None and version not in known:
            raise ConfigurationError(
                f"{_shown(engine)} has tables of version {version}, this release knows versions up "
                f"to {VERSION}: a newer release has used it. Nothing was changed; run that "
                "release, or go back to what was before it: `falaj restore` of a backup, or the "
                f"copy that it made of a SQLite file, {COPY.format(VERSION)} beside it; or name "
                "another database with FALAJ_DATABASE_URL or FALAJ_HOME"
            )
        if connection.dialect.name == "sqlite" and inspect(connection).get_table_names():
            _copy(Path(str(engine.url.database)), version or "unversioned")
        command.upgrade(config, VERSION)


def _copy(database: Path, version: str) -> None:
    """Keep a SQLite file as it is before a migration, for the way back."""
    copy = database.with_name(COPY.format(version))
    unfinished = copy.with_suffix(".part")
    with (
        closing(sqlite3.connect(database)) as source,
        closing(sqlite3.connect(unfinished)) as target,
    ):
        source.backup(target)
    unfinished.replace(copy)


def _version(connection: Connection) -> str | None:
    """Version of the database's tables; None where it is empty, or older than versions are."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: str | None = connection.execute(
        text(f"SELECT version_num FROM {VERSION_TABLE}")
    ).scalar_one_or_none()
    return version


def _shown(engine: Engine) -> str:
    return engine.url.difference_update_query(["options"]).render_as_string(hide_password=True)


def _explained(exc: DBAPIError, engine: Engine) -> Exception:
    where = _shown(engine)
    reason = (str(exc.orig).strip() or "no reason given").splitlines()[0]
    if any(sign in reason for sign in REFUSED):
        return StorageError(
            f"{where}: the disk refused ({reason}); expected a writable file with free space. "
            "Nothing was changed; free space or mend the permissions and run again"
        )
    if any(sign in reason for sign in DAMAGED):
        return StorageError(
            f"{where} is damaged ({reason}); expected a SQLite database. Move it away; "
            "`falaj restore` brings a backup into an empty state, else it begins empty"
        )
    if isinstance(exc, OperationalError | InterfaceError) or exc.connection_invalidated:
        return TransientError(
            f"{where} does not answer or is busy ({reason}). Nothing was changed; try it again"
        )
    return exc
