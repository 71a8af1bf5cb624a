"""The book of leases: every step of a claim, each one transaction."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.engine import Connection

from tasks.control.leases import table as rows
from tasks.control.leases.claims import HELD, WAITING, Claim
from tasks.control.leases.config import LeaseConfig, LeaseRequest
from tasks.control.leases.doorbell import ring
from tasks.control.leases.hardware import HostDevices
from tasks.control.leases.liveness import Liveness
from tasks.control.leases.placement import Taken, due_s, grants_for, place
from tasks.control.leases.table import LeaseTable
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.process import ProcessName

LOGGER = logging.getLogger(__name__)
MARK_BYTES = 8
# Claims of machines that never came back are cleared away after a week.
FORGOTTEN_AFTER_S = 7 * 86400.0


@dataclass(frozen=True)
class Outlook:
    """How things stand for one who waits.

    Args:
        version: of the book when it was read.
        now_s: the database's clock then.
        mine: the own claim; None where it is no longer there.
        is_my_turn: whether the devices could be taken.
        num_before: how many who wait are served first.
        others: all other claims that are somebody's.
    """

    version: int
    now_s: float
    mine: Claim | None
    is_my_turn: bool
    num_before: int
    others: tuple[Claim, ...]

    @property
    def holders(self) -> tuple[Claim, ...]:
        """Who holds devices."""
        return tuple(each for each in self.others if each.state == HELD)


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
    expires: datetime = Field(description="When it is lost without a sign of life; UTC.")
    token: int | None = Field(description="Fencing token; none where it waits.")


class LeaseBook:
    """The leases of one database, as one process uses them.

    Args:
        url: SQLAlchemy address, SQLite or PostgreSQL; see `Settings.operation_url`.
        config: for how long leases hold, and who waits how long.
        host: name of this machine, for people; its own where none is given.
        who: tells the calling process.
        clock: seconds since the machine's boot.

    Raises:
        ConfigurationError: the address is of another kind of database.
        TransientError, StorageError: the database does not answer, or refuses.
    """

    def __init__(
        self,
        url: str,
        config: LeaseConfig | None = None,
        host: str | None = None,
        who: Callable[[], ProcessName] = ProcessName.of_this,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or LeaseConfig()
        self.host = host or socket.gethostname()
        self.boot = who().boot
        self._who = who  # asked again for each claim: a process that forks is another one then
        self.table = LeaseTable(url)
        self._clock = clock
        self._liveness = Liveness(who(), clock)

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
            The claim; its `state` says whether it holds.

        Raises:
            ConfigurationError: this host does not have what is asked for.
        """
        _check_possible(request, devices)
        with self.table.writing() as connection:
            now_s = rows.now_s(connection)
            values = {
                "state": WAITING,
                "boot": self.boot,
                "holder": holder,
                "host": self.host,
                "process": self._who().model_dump_json(),
                "mark": secrets.token_hex(MARK_BYTES),
                "priority": priority,
                "due_s": due_s(self._clock(), priority, self.config.ageing_s)
                if place_in_line_s is None
                else place_in_line_s,
                "request": request.model_dump_json(),
                "devices": devices.model_dump_json(),
                "requested_s": now_s,
                "beat": 0,
                **self._signs(now_s),
            }
            ticket = rows.add(connection, values)
            claims, granted = self._serve(connection, now_s)
        ring(granted)
        return claims[ticket]

    def serve(self, claim: Claim) -> Claim | None:
        """Give to all who wait what they may have; the claim, or None where it is gone."""
        with self.table.writing() as connection:
            claims, granted = self._serve(connection, rows.now_s(connection))
        ring(granted)
        return claims.get(claim.ticket)

    def give_back(self, ticket: int) -> None:
        """Remove a claim, and give what it held to those who wait."""
        granted: list[str] = []
        with self.table.writing() as connection:
            rows.remove(connection, ticket)
            if rows.is_anybody_waiting(connection, self.boot):
                _, granted = self._serve(connection, rows.now_s(connection))
        ring(granted)

    def free_ended(self) -> list[Claim]:
        """Free what dead holders of this machine had, for a sweep; returns their claims.

        Claims of other machines stay until those come back, or have been silent for a week.
        """
        with self.table.writing() as connection:
            now_s = rows.now_s(connection)
            before = rows.all_claims(connection)
            for each in before:
                if now_s > each.expires_s + FORGOTTEN_AFTER_S and each.process.boot != self.boot:
                    rows.remove(connection, each.ticket, each.beat)
            _, granted = self._serve(connection, now_s)
            left = {each.ticket for each in rows.all_claims(connection)}
        ring(granted)
        return [each for each in before if each.ticket not in left]

    def _serve(self, connection: Connection, now_s: float) -> tuple[dict[int, Claim], list[str]]:
        """Free what is nobody's, and give to all who wait what they may have.

        Returns:
            All claims of this machine by ticket, and the marks of those that were served.
        """
        alive = {}
        for each in rows.claims_of_machine(connection, self.boot):
            why = self._liveness.why_gone(each, now_s)
            if why is not None and rows.remove(connection, each.ticket, each.beat):
                LOGGER.warning("taken from %s: %s", each, why)
            else:
                alive[each.ticket] = each
        claims = list(alive.values())
        grants = grants_for(self._waiting(claims), self._taken(claims))
        for ticket, grant in grants.items():
            alive[ticket] = rows.give(connection, alive[ticket], grant, now_s)
        return alive, [alive[ticket].mark for ticket in grants]

    def outlook(self, claim: Claim) -> Outlook:
        """How things stand for one who waits; changes nothing."""
        with self.table.reading() as connection:
            now_s = rows.now_s(connection)
            version = rows.version(connection)
            claims = rows.claims_of_machine(connection, self.boot)
        mine = next((each for each in claims if each.ticket == claim.ticket), None)
        others = [
            each
            for each in claims
            if each is not mine and self._liveness.why_gone(each, now_s) is None
        ]
        everyone = self._waiting(others) if mine is None else self._waiting([*others, mine])
        return Outlook(
            version=version,
            now_s=now_s,
            mine=mine,
            is_my_turn=claim.ticket in grants_for(everyone, self._taken(others)),
            num_before=sum(each.order < claim.order for each in self._waiting(others)),
            others=tuple(others),
        )

    def has_changed(self, outlook: Outlook) -> bool:
        """True where one who waits had better look anew: somebody came, went, or has died."""
        with self.table.reading() as connection:
            if rows.version(connection) != outlook.version:
                return True
        return any(
            self._liveness.why_gone(each, outlook.now_s) is not None for each in outlook.others
        )

    def renew(self, ticket: int) -> float | None:
        """Give a sign of life; the new deadline (`time.monotonic`), None where nothing is there."""
        with self.table.writing(takes_turn=False) as connection:
            signs = self._signs(rows.now_s(connection))
            return signs["deadline_s"] if rows.renew(connection, ticket, signs) else None

    def facts(self) -> list[LeaseFacts]:
        """Who holds what and who waits, machine by machine: holders first, then the line."""
        with self.table.reading() as connection:
            now_s = rows.now_s(connection)
            claims = rows.all_claims(connection)
        claims.sort(key=lambda each: (each.host, each.state != HELD, each.order))
        return [self._facts(each, now_s) for each in claims]

    def _facts(self, claim: Claim, now_s: float) -> LeaseFacts:
        is_here = claim.process.boot == self.boot
        is_gone = (
            self._liveness.why_gone(claim, now_s) is not None
            if is_here
            else now_s > claim.expires_s + claim.grace_s
        )
        since_s = claim.requested_s if claim.granted_s is None else claim.granted_s
        return LeaseFacts(
            ticket=claim.ticket,
            state="ended" if is_gone else claim.state,
            holder=claim.holder,
            host=claim.host,
            pid=claim.process.pid,
            devices=str(claim.grant or claim.request),
            priority=claim.priority,
            since=datetime.fromtimestamp(since_s, UTC),
            expires=datetime.fromtimestamp(claim.expires_s, UTC),
            token=claim.token,
        )

    def _signs(self, now_s: float) -> dict[str, float]:
        """What a sign of life writes: the deadline by the database's clock and the machine's."""
        ttl_s = self.config.ttl_s
        return {
            "expires_s": now_s + ttl_s,
            "deadline_s": self._clock() + ttl_s,
            "ttl_s": ttl_s,
            "grace_s": self.config.grace_s,
        }

    def _waiting(self, claims: list[Claim]) -> list[Claim]:
        return [c for c in claims if c.state == WAITING and c.process.boot == self.boot]

    def _taken(self, claims: list[Claim]) -> Taken:
        return Taken.by((each for each in claims if each.state == HELD), self.boot)


def _check_possible(request: LeaseRequest, devices: HostDevices) -> None:
    """Refuse what would be waited for in vain.

    Raises:
        ConfigurationError: this host does not have it, for this process.
    """
    if place(request, devices, Taken()) is not None:
        return
    gpus = [f"{gpu.mig_profile or gpu.name} {gpu.uuid}" for gpu in devices.gpus]
    unusable = "".join(f"; cannot be used: {each}" for each in devices.unusable)
    raise ConfigurationError(
        f"{request} cannot be leased here: this process may use {devices.num_cores} core(s) and "
        f"{', '.join(gpus) or 'no GPU'}{unusable}. Ask for less, or run where there is more"
    )
