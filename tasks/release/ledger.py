"""The record of releases: their state, what was decided by whom, and whether traffic followed.

    decided (generation + 1)  ->  traffic set, alias moved  ->  moved = generation

Both ends are one transaction each. A process killed in between leaves `moved` behind, and the next
cycle sets the traffic as decided before it reads anything; setting it twice changes nothing.
Whoever has set traffic asks again what is wanted, so of two who decide at once the later one's
decision is what stays.
"""

import json
import secrets
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, insert, select, update
from sqlalchemy.exc import IntegrityError

from tasks.contracts.rollout import Action, Entry, Evidence, Period, Shares
from tasks.kernel.errors import DataContractError
from tasks.metadata import tables
from tasks.metadata.database import database_now, open_database, transaction
from tasks.release.config import STORED, ReleaseConfig
from tasks.release.records import (
    BY_HAND,
    BY_ITSELF,
    OPEN,
    RELEASED,
    ROLLED_BACK,
    SUPERSEDED,
    Decision,
    Release,
)

_CLOSES = {Action.ROLL_BACK: ROLLED_BACK, Action.SUPERSEDE: SUPERSEDED}


class ReleaseLedger:
    """The database of releases.

    Args:
        url: SQLAlchemy address of the metadata database.

    Raises:
        ConfigurationError, TransientError, StorageError: as `open_database`.
    """

    def __init__(self, url: str) -> None:
        self.engine: Engine = open_database(url)

    def open(
        self,
        model: str,
        stable: str,
        candidate: str,
        config: ReleaseConfig,
        actor: str,
        *,
        can_split: bool,
        reason: str = "a new champion",
    ) -> Release:
        """Begin a release; its traffic is yet to be set.

        The one that is open is returned where it is of the same versions.

        Raises:
            DataContractError: another one of the model is open, or both versions are the same.
        """
        if stable == candidate:
            raise DataContractError(
                f"{model} version {candidate} is what serves already; there is nothing to release"
            )
        if known := self.open_release(model):
            return _same(known, stable, candidate)
        release_id = secrets.token_hex(16)
        try:
            with transaction(self.engine) as connection:
                now = database_now(connection)
                connection.execute(
                    insert(tables.releases).values(
                        release_id=release_id,
                        model=model,
                        stable=stable,
                        candidate=candidate,
                        state=OPEN,
                        step=0,
                        step_since=now,
                        opened_at=now,
                        opened_by=actor,
                        held_by="",
                        generation=1,
                        moved=0,
                        can_split=can_split,
                        config=config.model_dump_json(),
                    )
                )
                started = Decision(action=Action.START, rule="start", reason=reason)
                _write(connection, _read(connection, release_id), started, actor, None, now)
        except IntegrityError:
            known = self.open_release(model)
            if known is None:
                raise
            return _same(known, stable, candidate)
        return self.release(release_id)

    def release(self, release_id: str) -> Release:
        """One release.

        Raises:
            DataContractError: there is none.
        """
        with transaction(self.engine, reads_only=True) as connection:
            return _read(connection, release_id)

    def open_release(self, model: str) -> Release | None:
        """The open release of a model; None where there is none."""
        table = tables.releases
        return self._first(table.c.model == model, table.c.closed_at.is_(None))

    def last_release(self, model: str) -> Release | None:
        """The newest release of a model, open or closed."""
        return self._first(tables.releases.c.model == model)

    def last_of_candidate(self, model: str, candidate: str) -> Release | None:
        """The newest release of one version."""
        table = tables.releases
        return self._first(table.c.model == model, table.c.candidate == candidate)

    def of_model(self, model: str) -> list[Release]:
        """All releases of a model, oldest first."""
        table = tables.releases
        query = select(table.c.release_id).where(table.c.model == model).order_by(table.c.opened_at)
        with transaction(self.engine, reads_only=True) as connection:
            return [_read(connection, found) for found in connection.execute(query).scalars().all()]

    def decide(
        self, release: Release, decision: Decision, actor: str, evidence: Evidence | None = None
    ) -> Release:
        """Record a decision and, where it changes something, what is wanted from now on.

        Args:
            release: as it was when the decision was reached; if anything else was decided since,
                nothing is recorded.
            decision: what to do.
            actor: who decided.
            evidence: what was seen.

        Returns:
            The release as it is now.

        Raises:
            DataContractError: it is closed.
        """
        with transaction(self.engine) as connection:
            known = _read(connection, release.release_id, lock=True)
            if known.generation != release.generation or known.held_by != release.held_by:
                return known
            if not known.is_open:
                raise DataContractError(
                    f"{known.title} is closed ({known.state.replace('_', ' ')}); nothing was "
                    "changed. Start another release"
                )
            now = database_now(connection)
            if changes := _changes(known, decision, actor, now):
                _change(connection, known, **changes)
            _write(connection, known, decision, actor, evidence, now)
            return _read(connection, release.release_id)

    def mark_moved(self, release: Release) -> bool:
        """Note that traffic is as this release wanted it; False where it wants other by now.

        The step counts from this moment, and its period begins with it.
        """
        with transaction(self.engine) as connection:
            known = _read(connection, release.release_id, lock=True)
            if known.generation != release.generation:
                return False
            if known.is_moved:
                return True
            now = database_now(connection)
            _change(connection, known, moved=known.generation, step_since=now)
            _begin_period(connection, known, now)
            return True

    def note(self, release: Release, rule: str, reason: str) -> None:
        """Add a line that changes nothing, also to a closed release."""
        with transaction(self.engine) as connection:
            noted = Decision(action=Action.HOLD, rule=rule, reason=reason)
            _write(connection, release, noted, BY_ITSELF, None, database_now(connection))

    def entries(self, release_id: str) -> list[Entry]:
        """The record of one release, oldest first."""
        table = tables.entries
        query = select(table).where(table.c.release_id == release_id).order_by(table.c.number)
        with transaction(self.engine, reads_only=True) as connection:
            return [_entry(row) for row in connection.execute(query).mappings()]

    def _first(self, *where: Any) -> Release | None:
        table = tables.releases
        query = select(table.c.release_id).where(*where).order_by(table.c.opened_at.desc())
        with transaction(self.engine, reads_only=True) as connection:
            found = connection.execute(query.limit(1)).scalar_one_or_none()
            return None if found is None else _read(connection, found)


def _same(known: Release, stable: str, candidate: str) -> Release:
    if (known.stable, known.candidate) == (stable, candidate):
        return known
    raise DataContractError(
        f"{known.title} is open, so no release of version {candidate} was started; roll it back, "
        "or promote it to its end, first"
    )


def _changes(release: Release, decision: Decision, actor: str, now: datetime) -> dict[str, Any]:
    """Columns that a decision changes."""
    action = decision.action
    if action in _CLOSES:
        return _closing(release, _CLOSES[action], now)
    if action is Action.PROMOTE:
        if release.step + 1 == len(release.steps):
            return _closing(release, RELEASED, now)
        return {"step": release.step + 1, "generation": release.generation + 1, "step_since": now}
    if action is Action.RESUME:
        return {"held_by": ""}
    if action is Action.HOLD and decision.rule == BY_HAND:
        return {"held_by": actor}
    return {}


def _change(connection: Connection, release: Release, **values: Any) -> None:
    is_it = tables.releases.c.release_id == release.release_id
    connection.execute(update(tables.releases).where(is_it).values(**values))


def _closing(release: Release, state: str, now: datetime) -> dict[str, Any]:
    return {"state": state, "closed_at": now, "generation": release.generation + 1, "held_by": ""}


def _begin_period(connection: Connection, release: Release, now: datetime) -> None:
    """End the period before at the decision, and begin the next now that traffic is set."""
    table = tables.periods
    connection.execute(
        update(table)
        .where(table.c.release_id == release.release_id, table.c.until.is_(None))
        .values(until=release.closed_at or release.step_since)
    )
    if not release.is_open:
        return
    # Where nothing splits requests the candidate answers all of them in the track `stable`.
    shares = release.wanted.shares if release.can_split else Shares(candidate=100)
    connection.execute(
        insert(table).values(
            release_id=release.release_id,
            step=release.step,
            since=now,
            split=release.can_split,
            **shares.model_dump(),
        )
    )


def _write(
    connection: Connection,
    release: Release,
    decision: Decision,
    actor: str,
    evidence: Evidence | None,
    now: datetime,
) -> None:
    """Add a line to the record; a cycle that saw nothing new replaces the one before it."""
    table = tables.entries
    newest = connection.execute(
        select(table.c.number, table.c.rule, table.c.actor, table.c.generation, table.c.evidence)
        .where(table.c.release_id == release.release_id)
        .order_by(table.c.number.desc())
        .limit(1)
    ).first()
    values = {
        "at": now,
        "reason": decision.reason,
        "evidence": evidence.model_dump_json() if evidence else None,
    }
    known = (newest.rule, newest.actor, newest.generation) if newest else None
    is_cycle = decision.action is Action.HOLD
    if is_cycle and newest and known == (decision.rule, actor, release.generation):
        before = Evidence.model_validate_json(newest.evidence) if newest.evidence else None
        if before and evidence and _saw_the_same(before, evidence):
            connection.execute(update(table).where(table.c.number == newest.number).values(values))
            return
    connection.execute(
        insert(table).values(
            release_id=release.release_id,
            actor=actor,
            action=decision.action.value,
            rule=decision.rule,
            step=release.step,
            generation=release.generation,
            **values,
        )
    )


def _saw_the_same(before: Evidence, now: Evidence) -> bool:
    """Nothing, or next to nothing, was added: a twentieth more rows is worth a line."""
    counts = [
        (e.stable.num_requests + e.candidate.num_requests + e.shadow.num_requests, e.num_labels)
        for e in (before, now)
    ]
    return all(new <= old * 1.05 for old, new in zip(*counts, strict=True))


def _read(connection: Connection, release_id: str, *, lock: bool = False) -> Release:
    table = tables.releases
    query = select(table).where(table.c.release_id == release_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        raise DataContractError(f"there is no release {release_id[:12]} in the record")
    found = connection.execute(
        select(tables.periods)
        .where(tables.periods.c.release_id == release_id)
        .order_by(tables.periods.c.number)
    )
    periods = tuple(_period(one) for one in found.mappings())
    stored = json.loads(row["config"])  # of an earlier version it has fields that are gone
    config = {name: stored[name] for name in ReleaseConfig.model_fields if name in stored}
    values = {**row, "config": config, "periods": periods}
    return Release.model_validate(values, context=STORED)


def _period(row: RowMapping) -> Period:
    shares = Shares(**{name: row[name] for name in Shares.model_fields})
    own = {name: row[name] for name in ("step", "since", "until", "split")}
    return Period(**own, shares=shares)


def _entry(row: RowMapping) -> Entry:
    stored = row["evidence"]
    return Entry.model_validate({**row, "evidence": json.loads(stored) if stored else None})


def tracks_at_start(url: str, model: str, champion: str) -> dict[str, str | None] | None:
    """Versions that a serving process begins with, so that a restart moves no traffic.

    While a release is open the alias `champion` names the candidate already, which is not to answer
    everything because the process was started again; nor is one that was rolled back and whose
    alias the registry could not move.

    Args:
        url: metadata database.
        model: registered model.
        champion: version that the alias names.

    Returns:
        Version by track, or None where the alias decides.

    Raises:
        TransientError: the database does not answer.
    """
    release = ReleaseLedger(url).last_release(model)
    if release is None:
        return None
    refused = release.state == ROLLED_BACK and champion == release.candidate
    if not (release.is_open or refused or not release.is_moved):
        return None
    wanted = release.wanted
    return wanted.model_dump(exclude={"shares"})
