"""The leases of one database: every step of a claim, each one transaction.

A unit that is held is a row of `falaj_lease_units`; its primary key is what keeps it from being
held twice, whatever the code above it believes. Whoever gives or frees takes one row for itself
first, so decisions are made one after the other; heartbeats are not.

Whether a claim is still somebody's is decided by no clock that can jump, for a machine's own
claims. Who shares a device is on one machine, and there the clock since its boot (`time.monotonic`)
is the same for all and only goes forward. Claims of another boot (the machine lost power, or a
sandbox pretends to be a machine of its own) are gone when they have expired by the database's
clock, and the one who wants the device has itself seen no heartbeat for as long. A database's clock
that jumps ahead gives nothing away.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.engine import Connection

from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.placement import (
    HELD,
    WAITING,
    Claim,
    Grant,
    LeaseTerms,
    Taken,
    due_s,
    grants_for,
    place,
)
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.process import ProcessName, processes_by_variable
from tasks.metadata.database import database_now, open_database, transaction
from tasks.metadata.tables import lease_state, lease_units, leases

LOGGER = logging.getLogger(__name__)
LEASE_VARIABLE = "FALAJ_LEASE"
"""What a lease's holder has in its environment, and everything that it starts inherits."""
# Holders count with an answer, or a refusal, well before their leases expire.
ANSWER_WITHIN_S = 10
# Claims of machines that never came back are removed after a week.
ABANDONED_AFTER_S = 7 * 86400.0
# Those in one line mostly want and have the same; a long line is read often.
_devices = lru_cache(256)(HostDevices.model_validate_json)


@dataclass(frozen=True)
class Outlook:
    """How things stand for one who waits.

    Args:
        mine: the own claim; None where it is no longer there.
        is_my_turn: whether the devices could be taken.
        num_before: how many who wait are served first.
        holders: who holds devices.
    """

    mine: Claim | None
    is_my_turn: bool
    num_before: int
    holders: tuple[Claim, ...]


class LeaseFacts(BaseModel):
    """One claim as `status` shows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ticket: int
    state: str = Field(description="`held`, `waiting`, or `ended` where its holder is gone.")
    holder: str
    host: str
    pid: int
    devices: str = Field(description="What is held, or what is waited for.")
    priority: int
    since: datetime = Field(description="Since when it is held or waited for; UTC.")
    expires: datetime = Field(description="When it is lost without a heartbeat; UTC.")
    token: int | None = Field(description="Fencing token; none where it waits.")


class LeaseRepository:
    """The leases of one database, as one process uses them.

    Every method may raise TransientError or StorageError: the database does not answer, or refuses.

    Args:
        url: SQLAlchemy address, SQLite or PostgreSQL; see `Settings.metadata_url`.
        terms: for how long leases hold, and who waits how long.
        host: name of this machine, for people; its own where none is given.
        who: names the calling process; asked for each claim, as a fork is another process.
        clock: seconds since the machine's boot.

    Raises:
        ConfigurationError: the address is of another kind of database.
    """

    def __init__(
        self,
        url: str,
        terms: LeaseTerms = LeaseTerms(),  # noqa: B008  frozen
        host: str | None = None,
        who: Callable[[], ProcessName] = ProcessName.of_this,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.terms = terms
        self.host = host or socket.gethostname()
        # A lease does not outlive its machine's boot, so a power cut takes nothing of worth.
        self.engine = open_database(url, answer_within_s=ANSWER_WITHIN_S, synchronous="NORMAL")
        self._who, self._clock = who, clock
        self._me = who()
        self.boot = self._me.boot
        self._first_seen_s: dict[tuple[int, int], float] = {}

    def ask(
        self,
        request: LeaseRequest,
        holder: str,
        devices: HostDevices,
        priority: int,
        place_in_line_s: float | None = None,
    ) -> Claim:
        """Put a request in line; it is served at once where that can be.

        Args:
            request: what is wanted.
            holder: whose it will be, for people.
            devices: what the process may use.
            priority: 1 is the most urgent.
            place_in_line_s: `Claim.due_s` of one who has been in line before.

        Returns:
            The claim; its `state` is whether it holds.

        Raises:
            ConfigurationError: this host does not have what is asked for.
        """
        _check_possible(request, devices)
        if place_in_line_s is None:
            place_in_line_s = due_s(self._clock(), priority, self.terms.ageing_s)
        with self._changing() as (connection, now_s):
            row = {
                "state": WAITING,
                "boot": self.boot,
                "holder": holder,
                "host": self.host,
                "process": self._who().model_dump_json(),
                "mark": secrets.token_hex(8),
                "priority": priority,
                "due_s": place_in_line_s,
                "request": request.model_dump_json(),
                "devices": devices.model_dump_json(),
                "requested_s": now_s,
                "beat": 0,
                **self._heartbeat(now_s),
            }
            added = connection.execute(sa.insert(leases).values(row).returning(leases.c.ticket))
            return self._serve(connection, now_s)[added.scalar_one()]

    def serve(self, claim: Claim) -> Claim | None:
        """Give to all who wait what they may have; the claim, or None where it is gone."""
        with self._changing() as (connection, now_s):
            return self._serve(connection, now_s).get(claim.ticket)

    def give_back(self, ticket: int) -> None:
        """Remove a claim, and give what it held to those who wait."""
        with self._changing() as (connection, now_s):
            _remove(connection, ticket)
            self._serve(connection, now_s)

    def free_ended(self) -> list[Claim]:
        """Free what dead holders of this machine had, for a sweep; returns their claims.

        Claims of other machines stay until those come back, or have been silent for a week.
        """
        with self._changing() as (connection, now_s):
            before = _claims(connection)
            for each in before:
                if now_s > each.expires_s + ABANDONED_AFTER_S and each.process.boot != self.boot:
                    _remove(connection, each.ticket, each.beat)
            self._serve(connection, now_s)
            left = {each.ticket for each in _claims(connection)}
        return [each for each in before if each.ticket not in left]

    def outlook(self, claim: Claim) -> Outlook:
        """How things stand for one who waits; changes nothing."""
        with transaction(self.engine, reads_only=True) as connection:
            now_s = database_now(connection).timestamp()
            claims = self._claims_here(connection)
        mine = next((each for each in claims if each.ticket == claim.ticket), None)
        others = [each for each in claims if each is not mine and not self.why_gone(each, now_s)]
        line = self._waiting(others)
        everyone = line if mine is None else self._waiting([*others, mine])
        return Outlook(
            mine=mine,
            is_my_turn=claim.ticket in grants_for(everyone, Taken.by(others, self.boot)),
            num_before=sum(each.order < claim.order for each in line),
            holders=tuple(each for each in others if each.state == HELD),
        )

    def renew(self, ticket: int) -> float | None:
        """Give a heartbeat; the new deadline (`time.monotonic`), None where nothing is there."""
        with transaction(self.engine) as connection:
            beat = self._heartbeat(database_now(connection).timestamp())
            change = sa.update(leases).where(leases.c.ticket == ticket)
            renewed = connection.execute(change.values(**beat, beat=leases.c.beat + 1))
            return beat["deadline_s"] if renewed.rowcount == 1 else None

    def facts(self) -> list[LeaseFacts]:
        """Who holds what and who waits, machine by machine: holders first, then the line."""
        with transaction(self.engine, reads_only=True) as connection:
            now_s = database_now(connection).timestamp()
            claims = _claims(connection)
        claims.sort(key=lambda each: (each.host, each.state != HELD, each.order))
        return [self._facts(each, now_s) for each in claims]

    def why_gone(self, claim: Claim, now_s: float) -> str | None:
        """Why a claim is nobody's any more; None where it still is somebody's.

        Args:
            claim: as it was read last.
            now_s: the database's clock.
        """
        patience_s = claim.ttl_s + claim.grace_s
        if claim.process.boot != self.boot:
            seen_s = self._first_seen_s.setdefault((claim.ticket, claim.beat), self._clock())
            silent = self._clock() - seen_s > patience_s
            expired = now_s > claim.expires_s + claim.grace_s
            return "its machine has gone" if silent and expired else None
        if self._clock() > claim.deadline_s + claim.grace_s:
            return f"it gave no heartbeat for {patience_s:g} s"
        if not claim.process.is_visible_to(self._me) or not claim.process.has_ended():
            return None
        if claim.state == HELD and processes_of_lease(claim.lease_id):
            return None  # what it started still runs, under its guard, for some seconds
        return "its process has ended"

    @contextmanager
    def _changing(self) -> Iterator[tuple[Connection, float]]:
        """A transaction alone among those that give and free, and the database's clock."""
        with transaction(self.engine) as connection:
            connection.execute(sa.select(lease_state.c.version).with_for_update())
            yield connection, database_now(connection).timestamp()

    def _serve(self, connection: Connection, now_s: float) -> dict[int, Claim]:
        """Free what is nobody's, and give to all who wait what they may have.

        Returns:
            All claims of this machine by ticket.
        """
        alive = {}
        for each in self._claims_here(connection):
            why = self.why_gone(each, now_s)
            if why is not None and _remove(connection, each.ticket, each.beat):
                LOGGER.warning("taken from %s: %s", each, why)
            else:
                alive[each.ticket] = each
        claims = list(alive.values())
        grants = grants_for(self._waiting(claims), Taken.by(claims, self.boot))
        for ticket, grant in grants.items():
            alive[ticket] = _give(connection, alive[ticket], grant, now_s)
        return alive

    def _claims_here(self, connection: Connection) -> list[Claim]:
        """Claims of this boot of this machine, and others that hold a GPU which these may use."""
        own = _claims(connection, leases.c.boot == self.boot)
        gpus = sorted({gpu.uuid for claim in own for gpu in claim.devices.gpus})
        if not gpus:
            return own
        holders = sa.select(lease_units.c.ticket).where(lease_units.c.unit.in_(gpus))
        elsewhere = (leases.c.boot != self.boot) & leases.c.ticket.in_(holders)
        return own + _claims(connection, elsewhere)

    def _waiting(self, claims: list[Claim]) -> list[Claim]:
        return [c for c in claims if c.state == WAITING and c.process.boot == self.boot]

    def _heartbeat(self, now_s: float) -> dict[str, float]:
        """What a heartbeat writes: the deadline by the database's clock and the machine's."""
        ttl_s = self.terms.ttl_s
        return {
            "expires_s": now_s + ttl_s,
            "deadline_s": self._clock() + ttl_s,
            "ttl_s": ttl_s,
            "grace_s": self.terms.grace_s,
        }

    def _facts(self, claim: Claim, now_s: float) -> LeaseFacts:
        is_gone = now_s > claim.expires_s + claim.grace_s
        if claim.process.boot == self.boot:
            is_gone = self.why_gone(claim, now_s) is not None
        since_s = claim.requested_s if claim.granted_s is None else claim.granted_s
        return LeaseFacts(
            **claim.model_dump(include={"ticket", "holder", "host", "priority", "token"}),
            state="ended" if is_gone else claim.state,
            pid=claim.process.pid,
            devices=str(claim.grant or claim.request),
            since=datetime.fromtimestamp(since_s, UTC),
            expires=datetime.fromtimestamp(claim.expires_s, UTC),
        )


@lru_cache(256)
def _request(text: str) -> LeaseRequest:
    """A stored request; what an earlier release asked for beside is left out."""
    stored = json.loads(text)
    return LeaseRequest.model_validate(
        {k: stored[k] for k in stored.keys() & LeaseRequest.model_fields}
    )


def processes_of_lease(lease_id: str) -> list[int]:
    """Process ids of everything that was started under a lease and still runs."""
    return processes_by_variable(LEASE_VARIABLE).get(lease_id, [])


def _give(connection: Connection, claim: Claim, grant: Grant, moment_s: float) -> Claim:
    """Let a claim that waits hold what is granted; the claim as it then is.

    Raises:
        IntegrityError: a unit is held by another; nothing is changed.
    """
    units = [
        {"unit": unit, "part": 0, "ticket": claim.ticket}
        for unit in grant.units(claim.process.boot)
    ]
    connection.execute(sa.insert(lease_units), units)
    connection.execute(sa.update(lease_state).values(last_token=lease_state.c.last_token + 1))
    token = int(connection.scalar(sa.select(lease_state.c.last_token)) or 0)
    held = {"state": HELD, "token": token, "granted_s": moment_s}
    change = sa.update(leases).where(leases.c.ticket == claim.ticket)
    connection.execute(change.values(**held, lease=grant.model_dump_json()))
    return claim.model_copy(update={**held, "grant": grant})


def _remove(connection: Connection, ticket: int, beat: int | None = None) -> bool:
    """Remove a claim and free what it holds; False where it is gone, or has beaten since `beat`."""
    which = leases.c.ticket == ticket
    if beat is not None:
        which &= leases.c.beat == beat
    if connection.execute(sa.delete(leases).where(which)).rowcount == 0:
        return False
    connection.execute(sa.delete(lease_units).where(lease_units.c.ticket == ticket))
    return True


def _claims(connection: Connection, which: sa.ColumnElement[bool] | None = None) -> list[Claim]:
    query = sa.select(leases).order_by(leases.c.due_s, leases.c.ticket)
    rows = connection.execute(query if which is None else query.where(which)).mappings()
    return [_claim(dict(row)) for row in rows]


def _claim(row: dict[str, Any]) -> Claim:
    lease, lease_id = row.pop("lease"), row.pop("mark")
    return Claim(
        **{name: row[name] for name in row.keys() - {"boot", "process", "request", "devices"}},
        lease_id=lease_id,
        process=ProcessName.model_validate_json(row["process"]),
        request=_request(row["request"]),
        devices=_devices(row["devices"]),
        grant=None if lease is None else Grant.model_validate_json(lease),
    )


def _check_possible(request: LeaseRequest, devices: HostDevices) -> None:
    """Reject what would be waited for in vain."""
    if place(request, devices, Taken()) is not None:
        return
    gpus = [f"{gpu.mig_profile or gpu.name} {gpu.uuid}" for gpu in devices.gpus]
    unusable = "".join(f"; cannot be used: {each}" for each in devices.unusable)
    raise ConfigurationError(
        f"{request} cannot be leased here: this process may use {devices.num_cores} core(s) and "
        f"{', '.join(gpus) or 'no GPU'}{unusable}. Ask for less, or run where there is more"
    )
