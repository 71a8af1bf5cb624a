"""The tables of the leases, in SQLite or PostgreSQL, and everything that is asked of them.

A unit that is held is a row of `falaj_lease_units`; its primary key is what keeps it from being
held twice, whatever the code above it believes. Whoever gives or frees takes one row for itself
first, so decisions are made one after the other; signs of life are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tasks.control.leases.claims import HELD, WAITING, Claim, Grant
from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.hardware import HostDevices
from tasks.kernel.errors import StorageError
from tasks.kernel.process import ProcessName
from tasks.metadata.database import database_now, open_database, transaction
from tasks.metadata.tables import lease_state, lease_units, leases

# Holders count with an answer, or a refusal, well before their leases expire.
ANSWER_WITHIN_S = 10
# Those in one line mostly want and have the same; a long line is read often.
NUM_REMEMBERED = 256


class LeaseTable:
    """The tables of one database.

    Args:
        url: see `open_database`.

    Raises:
        ConfigurationError, TransientError, StorageError: as `open_database`; every method may
            raise the last two.
    """

    def __init__(self, url: str) -> None:
        # A lease does not outlive its machine's boot, so nothing is lost with the power.
        self.engine = open_database(url, answer_within_s=ANSWER_WITHIN_S, synchronous="NORMAL")

    @contextmanager
    def writing(self, *, takes_turn: bool = True) -> Iterator[Connection]:
        """A transaction; with `takes_turn`, alone among those that give and free."""
        with transaction(self.engine) as connection:
            if takes_turn:
                connection.execute(sa.select(lease_state.c.version).with_for_update())
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that keeps nobody from writing."""
        with transaction(self.engine, reads_only=True) as connection:
            yield connection


def now_s(connection: Connection) -> float:
    """Unix time of the database's own clock, seconds."""
    return database_now(connection).timestamp()


def version(connection: Connection) -> int:
    """Counts all changes of who waits and who holds."""
    return int(connection.scalar(sa.select(lease_state.c.version)) or 0)


def add(connection: Connection, values: dict[str, Any]) -> int:
    """Add a claim; returns its ticket."""
    ticket = connection.execute(sa.insert(leases).values(values)).inserted_primary_key
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
    connection.execute(sa.insert(lease_units), units)
    connection.execute(sa.update(lease_state).values(last_token=lease_state.c.last_token + 1))
    token = int(connection.scalar(sa.select(lease_state.c.last_token)) or 0)
    held = {"state": HELD, "token": token, "granted_s": moment_s}
    row = {**held, "lease": grant.model_dump_json()}
    connection.execute(sa.update(leases).where(leases.c.ticket == claim.ticket).values(row))
    _changed(connection)
    return claim.model_copy(update={**held, "grant": grant})


def renew(connection: Connection, ticket: int, values: dict[str, Any]) -> bool:
    """A sign of life; False where the claim is no longer there."""
    beaten = {**values, "beat": leases.c.beat + 1}
    change = sa.update(leases).where(leases.c.ticket == ticket).values(beaten)
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
    that = leases.c.ticket == ticket
    same = that if beat is None else that & (leases.c.beat == beat)
    if connection.execute(sa.delete(leases).where(same)).rowcount == 0:
        return False
    connection.execute(sa.delete(lease_units).where(lease_units.c.ticket == ticket))
    _changed(connection)
    return True


def claims_of_machine(connection: Connection, boot: str) -> list[Claim]:
    """Claims of this boot of this machine, and others that hold a GPU which these may use."""
    own = _claims(connection, leases.c.boot == boot)
    gpus = sorted({gpu.uuid for claim in own for gpu in claim.devices.gpus})
    if not gpus:
        return own
    holders = sa.select(lease_units.c.ticket).where(lease_units.c.unit.in_(gpus))
    return own + _claims(connection, (leases.c.boot != boot) & leases.c.ticket.in_(holders))


def all_claims(connection: Connection) -> list[Claim]:
    """Every claim of every machine."""
    return _claims(connection, sa.true())


def is_anybody_waiting(connection: Connection, boot: str) -> bool:
    """True where somebody on this machine waits."""
    first = sa.select(leases.c.ticket).where(leases.c.boot == boot, leases.c.state == WAITING)
    return connection.scalar(first.limit(1)) is not None


def _claims(connection: Connection, which: sa.ColumnElement[bool]) -> list[Claim]:
    rows: Iterable[Any] = connection.execute(
        sa.select(leases).where(which).order_by(leases.c.due_s, leases.c.ticket)
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
    connection.execute(sa.update(lease_state).values(version=lease_state.c.version + 1))
