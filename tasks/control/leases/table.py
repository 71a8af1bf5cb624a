"""The tables of the leases, in SQLite or PostgreSQL, and everything that is asked of them.

A unit that is held is a row of `falaj_lease_units`; its primary key is what keeps it from being
held twice, whatever the code above it believes. Whoever gives or frees takes one row for itself
first, so decisions are made one after the other; signs of life are not.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from tasks.control.leases.claims import HELD, WAITING, Claim, Grant
from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.hardware import HostDevices
from tasks.kernel.errors import ConfigurationError, StorageError, TransientError
from tasks.kernel.process import ProcessName
from tasks.kernel.settings import private_folder

# Holders count with an answer, or a refusal, well before their leases expire.
CONNECT_WITHIN_S = 5
ANSWER_WITHIN_S = 10
LOOK_AGAIN_S = 0.05
# Those in one line mostly want and have the same; a long line is read often.
NUM_REMEMBERED = 256
REFUSALS = ("full", "readonly", "read-only", "malformed", "not a database")
CREATION_LOCK = 7_203_114  # of PostgreSQL's advisory locks; any number that nobody else uses

METADATA = sa.MetaData()
STATE = sa.Table(
    "falaj_lease_state",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("last_token", sa.BigInteger, nullable=False),
)
CLAIMS = sa.Table(
    "falaj_leases",
    METADATA,
    sa.Column("ticket", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("state", sa.String(10), nullable=False),
    sa.Column("boot", sa.String(64), nullable=False, index=True),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("process", sa.Text, nullable=False),
    sa.Column("mark", sa.String(32), nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("due_s", sa.Double, nullable=False),
    sa.Column("request", sa.Text, nullable=False),
    sa.Column("devices", sa.Text, nullable=False),
    sa.Column("token", sa.BigInteger, unique=True),
    sa.Column("lease", sa.Text),
    sa.Column("requested_s", sa.Double, nullable=False),
    sa.Column("granted_s", sa.Double),
    sa.Column("expires_s", sa.Double, nullable=False),
    sa.Column("deadline_s", sa.Double, nullable=False),
    sa.Column("ttl_s", sa.Double, nullable=False),
    sa.Column("grace_s", sa.Double, nullable=False),
    sa.Column("beat", sa.BigInteger, nullable=False),
    sqlite_autoincrement=True,  # a ticket is never given again
)
UNITS = sa.Table(
    "falaj_lease_units",
    METADATA,
    sa.Column("unit", sa.String(160), primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("ticket", sa.BigInteger, nullable=False, index=True),
)


def open_database(url: str) -> Engine:
    """An engine for the database at `url`, without a pool: processes that fork may share it.

    Raises:
        ConfigurationError: the URL is none of SQLite or PostgreSQL.
        StorageError: the folder of a SQLite file cannot be made.
    """
    try:
        parsed = make_url(url)
    except sa.exc.ArgumentError as exc:
        raise ConfigurationError(
            "the database's URL cannot be read; see FALAJ_DATABASE_URL"
        ) from exc
    if parsed.get_backend_name() == "postgresql":
        limit = f"-c statement_timeout={ANSWER_WITHIN_S}s -c lock_timeout={ANSWER_WITHIN_S}s"
        return sa.create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            poolclass=NullPool,
            connect_args={"connect_timeout": CONNECT_WITHIN_S, "options": limit},
        )
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        raise ConfigurationError(
            f"leases are kept in SQLite or PostgreSQL, not in {parsed.get_backend_name()!r} "
            "(a SQLite URL names a file); see FALAJ_DATABASE_URL"
        )
    private_folder(Path(parsed.database).parent)
    engine = sa.create_engine(
        parsed.set(drivername="sqlite+pysqlite"),
        poolclass=NullPool,
        connect_args={"timeout": ANSWER_WITHIN_S},
    )
    return _with_immediate_transactions(engine)


def _with_immediate_transactions(engine: Engine) -> Engine:
    """Let SQLite take the write lock at the start: a later wish for it would fail, not wait."""

    def on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=NORMAL")

    def on_begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get("falaj_reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    sa.event.listen(engine, "connect", on_connect)
    sa.event.listen(engine, "begin", on_begin)
    return engine


def _write_ahead(connection: Any) -> None:
    """Let readers and a writer not wait for each other; SQLite itself does not wait to change it.

    Raises:
        TransientError: others kept the file for themselves all the time.
    """
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() > deadline:
                raise TransientError(f"the database of the leases does not answer: {exc}") from exc
            time.sleep(LOOK_AGAIN_S)


@contextmanager
def explained(engine: Engine) -> Iterator[None]:
    """Turn what the database refuses into errors of ours.

    Raises:
        TransientError: it cannot be reached, is locked, or did not answer in time.
        StorageError: it is there, and refuses.
    """
    where = engine.url.render_as_string(hide_password=True)
    try:
        yield
    except IntegrityError:
        raise  # a unit would be held twice: an error in this program, to be seen as it is
    except (sa.exc.OperationalError, sa.exc.InterfaceError) as exc:
        if any(word in _first_line(exc) for word in REFUSALS):
            raise StorageError(f"the database of the leases ({where}): {_first_line(exc)}") from exc
        raise TransientError(
            f"the database of the leases ({where}) does not answer: {_first_line(exc)}"
        ) from exc
    except DBAPIError as exc:
        raise StorageError(f"the database of the leases ({where}): {_first_line(exc)}") from exc


def _first_line(exc: DBAPIError) -> str:
    return str(exc.orig).strip().partition("\n")[0]


class LeaseTable:
    """The tables of one database.

    Args:
        engine: see `open_database`.

    Raises:
        TransientError, StorageError: as `explained`; so does every method.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        if not self._is_made():
            self._make()

    def _is_made(self) -> bool:
        with self.reading() as connection:
            is_there = sa.inspect(connection).has_table(STATE.name)
            return is_there and connection.scalar(sa.select(STATE.c.id)) is not None

    def _make(self) -> None:
        with self.writing(takes_turn=False) as connection:
            if connection.dialect.name == "postgresql":
                lock = sa.select(sa.func.pg_advisory_xact_lock(CREATION_LOCK))
                connection.execute(lock)
            METADATA.create_all(connection)
            if connection.scalar(sa.select(STATE.c.id)) is None:
                connection.execute(sa.insert(STATE).values(id=1, version=0, last_token=0))

    @contextmanager
    def writing(self, *, takes_turn: bool = True) -> Iterator[Connection]:
        """A transaction; with `takes_turn`, alone among those that give and free."""
        with explained(self.engine), self.engine.begin() as connection:
            if takes_turn:
                connection.execute(sa.select(STATE.c.version).with_for_update())
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that keeps nobody from writing."""
        with explained(self.engine), self.engine.connect() as plain:
            connection = plain.execution_options(falaj_reads=True)
            with connection.begin():
                yield connection


def now_s(connection: Connection) -> float:
    """Unix time of the database's own clock, seconds."""
    postgres = connection.dialect.name == "postgresql"
    text = "extract(epoch from clock_timestamp())" if postgres else SQLITE_NOW
    return float(connection.scalar(sa.text(f"select {text}")) or 0.0)


SQLITE_NOW = "(julianday('now') - 2440587.5) * 86400.0"


def version(connection: Connection) -> int:
    """Counts all changes of who waits and who holds."""
    return int(connection.scalar(sa.select(STATE.c.version)) or 0)


def add(connection: Connection, values: dict[str, Any]) -> int:
    """Add a claim; returns its ticket."""
    ticket = connection.execute(sa.insert(CLAIMS).values(values)).inserted_primary_key
    _changed(connection)
    if ticket is None:
        raise StorageError("the database of the leases gave no number to a new row")
    return int(ticket[0])


def give(connection: Connection, claim: Claim, grant: Grant, moment_s: float) -> Claim:
    """Let a claim that waits hold what is granted; the claim as it then is.

    Raises:
        IntegrityError: a unit is held by another; nothing is changed.
    """
    units = [
        {"unit": unit, "part": part, "ticket": claim.ticket}
        for unit, part in grant.units(claim.process.boot)
    ]
    connection.execute(sa.insert(UNITS), units)
    connection.execute(sa.update(STATE).values(last_token=STATE.c.last_token + 1))
    token = int(connection.scalar(sa.select(STATE.c.last_token)) or 0)
    held = {"state": HELD, "token": token, "granted_s": moment_s}
    row = {**held, "lease": grant.model_dump_json()}
    connection.execute(sa.update(CLAIMS).where(CLAIMS.c.ticket == claim.ticket).values(row))
    _changed(connection)
    return claim.model_copy(update={**held, "grant": grant})


def renew(connection: Connection, ticket: int, values: dict[str, Any]) -> bool:
    """A sign of life; False where the claim is no longer there."""
    beaten = {**values, "beat": CLAIMS.c.beat + 1}
    change = sa.update(CLAIMS).where(CLAIMS.c.ticket == ticket).values(beaten)
    return connection.execute(change).rowcount == 1


def remove(connection: Connection, ticket: int, beat: int | None = None) -> bool:
    """Remove a claim and free what it holds.

    Args:
        connection: of a transaction.
        ticket: of the claim.
        beat: signs of life; the claim stays where it has given another since. None: in any case.

    Returns:
        False where it is no longer there, or stays.
    """
    that = CLAIMS.c.ticket == ticket
    same = that if beat is None else that & (CLAIMS.c.beat == beat)
    if connection.execute(sa.delete(CLAIMS).where(same)).rowcount == 0:
        return False
    connection.execute(sa.delete(UNITS).where(UNITS.c.ticket == ticket))
    _changed(connection)
    return True


def claims_of_machine(connection: Connection, boot: str) -> list[Claim]:
    """Claims of this boot of this machine, and others that hold a GPU which these may use."""
    own = _claims(connection, CLAIMS.c.boot == boot)
    gpus = sorted({gpu.uuid for claim in own for gpu in claim.devices.gpus})
    if not gpus:
        return own
    holders = sa.select(UNITS.c.ticket).where(UNITS.c.unit.in_(gpus))
    return own + _claims(connection, (CLAIMS.c.boot != boot) & CLAIMS.c.ticket.in_(holders))


def all_claims(connection: Connection) -> list[Claim]:
    """Every claim of every machine."""
    return _claims(connection, sa.true())


def is_anybody_waiting(connection: Connection, boot: str) -> bool:
    """True where somebody on this machine waits."""
    first = sa.select(CLAIMS.c.ticket).where(CLAIMS.c.boot == boot, CLAIMS.c.state == WAITING)
    return connection.scalar(first.limit(1)) is not None


def _claims(connection: Connection, which: sa.ColumnElement[bool]) -> list[Claim]:
    rows: Iterable[Any] = connection.execute(
        sa.select(CLAIMS).where(which).order_by(CLAIMS.c.due_s, CLAIMS.c.ticket)
    ).mappings()
    return [_claim(dict(row)) for row in rows]


def _claim(row: dict[str, Any]) -> Claim:
    lease = row.pop("lease")
    return Claim(
        **{name: row[name] for name in row.keys() - {"boot", "process", "request", "devices"}},
        process=ProcessName.model_validate_json(row["process"]),
        request=_request(row["request"]),
        devices=_devices(row["devices"]),
        grant=None if lease is None else Grant.model_validate_json(lease),
    )


@lru_cache(NUM_REMEMBERED)
def _request(text: str) -> LeaseRequest:
    return LeaseRequest.model_validate_json(text)


@lru_cache(NUM_REMEMBERED)
def _devices(text: str) -> HostDevices:
    return HostDevices.model_validate_json(text)


def _changed(connection: Connection) -> None:
    connection.execute(sa.update(STATE).values(version=STATE.c.version + 1))
