"""What is known of one model and use case, read and written under its lock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    Table,
    and_,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from tasks.control.retraining.budget import KINDS, Spent
from tasks.control.retraining.clock import Uptime
from tasks.control.retraining.config import GovernorConfig
from tasks.control.retraining.decision import Action, Cause, Choice
from tasks.control.retraining.evidence import Evidence
from tasks.control.retraining.records import ClaimState, Outcome, StoredVerdict
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import content_key
from tasks.metadata import database, tables

Value = TypeVar("Value", bound=BaseModel)


@dataclass(frozen=True)
class Episode:
    """One stretch of trouble of one cause, and whether its one run was claimed."""

    episode_id: str
    version: int
    cause: Cause
    newest: str
    """Id of the latest verdict that showed it."""
    is_claimed: bool
    recalibrated: bool = False
    """Its run was a recalibration, and has ended."""


class Book:
    """The rows of one model and use case, while its lock is held.

    Args:
        connection: a transaction that holds the lock.
        model: registered model.
        use_case: name of the use case.
        actor: who asks, as the record names it.
    """

    def __init__(self, connection: Connection, model: str, use_case: str, actor: str) -> None:
        self._connection = connection
        self.model, self.use_case, self.actor = model, use_case, actor
        self.now = database.database_now(connection)
        self._uptime = Uptime.now()
        self._bring_later_claims_to_now()

    def unanswered(self) -> list[StoredVerdict]:
        """Verdicts without an answer, in the order in which they were stored."""
        table = tables.drift_results
        rows = self._connection.execute(
            select(table)
            .where(self._mine(table), table.c.answered_at.is_(None))
            .order_by(table.c.number)
        )
        return [read_verdict_row(row) for row in rows.mappings()]

    def verdict(self, verdict_id: str) -> StoredVerdict:
        """One stored verdict."""
        table = tables.drift_results
        query = select(table).where(table.c.verdict_id == verdict_id)
        return read_verdict_row(self._connection.execute(query).mappings().one())

    def latest_window_end(self) -> datetime | None:
        """End of the latest window that was answered."""
        table = tables.drift_results
        query = select(table.c.window_end).where(
            self._mine(table), table.c.answered_at.is_not(None)
        )
        moment = self._connection.execute(
            query.order_by(table.c.window_end.desc()).limit(1)
        ).scalar_one_or_none()
        return moment

    def mark_answered(self, verdict_id: str) -> None:
        """Note that the verdict has its answer."""
        table = tables.drift_results
        self._connection.execute(
            update(table).where(table.c.verdict_id == verdict_id).values(answered_at=self.now)
        )

    def open_episodes(self) -> list[Episode]:
        """Episodes that have not been closed, the oldest first."""
        table, claims = tables.incidents, tables.actions
        rows = self._connection.execute(
            select(table, claims.c.episode_id.label("claim"), claims.c.action, claims.c.state)
            .outerjoin(claims, claims.c.episode_id == table.c.episode_id)
            .where(self._mine(table), table.c.closed_at.is_(None))
            .order_by(table.c.opened_at, table.c.episode_id)
        )
        return [
            Episode(
                episode_id=row["episode_id"],
                version=row["version"],
                cause=Cause(row["cause"]),
                newest=row["newest"],
                is_claimed=row["claim"] is not None,
                recalibrated=(row["action"], row["state"])
                == (Action.RECALIBRATE.value, ClaimState.ENDED.value),
            )
            for row in rows.mappings()
        ]

    def episode(self, verdict: StoredVerdict, cause: Cause) -> Episode:
        """The open episode of this cause, or a new one; the verdict is its newest."""
        for known in self.open_episodes():
            if known.cause is cause:
                table = tables.incidents
                self._connection.execute(
                    update(table)
                    .where(table.c.episode_id == known.episode_id)
                    .values(newest=verdict.verdict_id)
                )
                return known
        episode_id = content_key("episode", self.model, self.use_case, cause, verdict.verdict_id)
        self._connection.execute(
            insert(tables.incidents).values(
                episode_id=episode_id,
                model=self.model,
                use_case=self.use_case,
                version=verdict.evidence.version,
                cause=cause.value,
                opened_by=verdict.verdict_id,
                newest=verdict.verdict_id,
                opened_at=self.now,
            )
        )
        version = verdict.evidence.version
        return Episode(episode_id, version, cause, verdict.verdict_id, is_claimed=False)

    def close(self, episode: Episode, by: str) -> None:
        """End an episode: the next bad verdict of its cause opens another one."""
        table = tables.incidents
        self._connection.execute(
            update(table)
            .where(table.c.episode_id == episode.episode_id)
            .values(closed_at=self.now, closed_by=by)
        )

    def spent(self) -> list[Spent]:
        """Retrainings and recalibrations of the model that were claimed before, oldest first."""
        table, verdicts = tables.actions, tables.drift_results
        kinds = [action.value for action in KINDS]
        rows = self._connection.execute(
            select(table, verdicts.c.version)
            .join(verdicts, verdicts.c.verdict_id == table.c.verdict_id)
            .where(table.c.model == self.model, table.c.action.in_(kinds))
            .order_by(table.c.claimed_at)
        )
        return [
            Spent(
                claimed_at=self._when_claimed(row),
                seconds=row["run_seconds"],
                action=Action(row["action"]),
                version=row["version"],
                has_ended=row["state"] == ClaimState.ENDED.value,
            )
            for row in rows.mappings()
        ]

    def _when_claimed(self, row: RowMapping) -> datetime:
        """As the clock shows it that is set now, however wrong it was then."""
        noted: datetime = row["claimed_at"]
        if row["boot"] is None:
            return noted
        age_s = self._uptime.seconds_since(Uptime(row["boot"], row["uptime_s"]))
        return noted if age_s is None else self.now - timedelta(seconds=age_s)

    def claim(self, episode: Episode, action: Action, verdict_id: str, reason: str) -> None:
        """Take the one run of an episode; the primary key lets nobody take it twice."""
        self._connection.execute(
            insert(tables.actions).values(
                episode_id=episode.episode_id,
                model=self.model,
                use_case=self.use_case,
                action=action.value,
                verdict_id=verdict_id,
                reason=reason,
                state=ClaimState.CLAIMED.value,
                claimed_at=self.now,
                claimed_by=self.actor,
                num_starts=0,
                boot=self._uptime.boot,
                uptime_s=self._uptime.seconds,
            )
        )

    def write(
        self,
        verdict_id: str,
        choice: Choice,
        outcome: Outcome,
        reason: str,
        episode: Episode | None = None,
        carried_out_as: Action | None = None,
    ) -> int:
        """Add one row to the record; returns its number."""
        made = self._connection.execute(
            insert(tables.decisions)
            .values(
                decided_at=self.now,
                model=self.model,
                use_case=self.use_case,
                verdict_id=verdict_id,
                episode_id=episode.episode_id if episode else None,
                cause=choice.cause.value if choice.cause else None,
                action=choice.action.value,
                carried_out_as=carried_out_as.value if carried_out_as else None,
                rule=choice.rule,
                outcome=outcome.value,
                reason=reason,
                actor=self.actor,
            )
            .returning(tables.decisions.c.number)
        )
        return int(made.scalar_one())

    def last_outcome(self, episode: Episode) -> Outcome | None:
        """Outcome of the latest row about an episode."""
        table = tables.decisions
        query = (
            select(table.c.outcome)
            .where(table.c.episode_id == episode.episode_id)
            .order_by(table.c.number.desc())
            .limit(1)
        )
        found = self._connection.execute(query).scalar_one_or_none()
        return None if found is None else Outcome(found)

    def _mine(self, table: Table) -> ColumnElement[bool]:
        return and_(table.c.model == self.model, table.c.use_case == self.use_case)

    def _bring_later_claims_to_now(self) -> None:
        """Where the clock was set back, what it says was claimed later counts from now on.

        Else a clock that had been years ahead would hold every cool-down for years.
        """
        table = tables.actions
        self._connection.execute(
            update(table)
            .where(table.c.model == self.model, table.c.claimed_at > self.now)
            .values(claimed_at=self.now)
        )


@contextmanager
def governing(engine: Engine, model: str, use_case: str, actor: str) -> Iterator[Book]:
    """Be the only one who decides about this model and use case, in one transaction.

    Raises:
        TransientError: the database does not answer, or was busy.
        StorageError: its disk refused.
    """
    with database.transaction(engine) as connection:
        lock(connection, model)
        yield Book(connection, model, use_case, actor)


def lock(connection: Connection, model: str) -> None:
    """Hold the row of a model until the transaction ends."""
    table = tables.models
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    connection.execute(dialect.insert(table).values(model=model).on_conflict_do_nothing())
    connection.execute(select(table).where(table.c.model == model).with_for_update()).all()


def read_verdict_row(row: RowMapping) -> StoredVerdict:
    """A row of the table of verdicts as a value."""
    return StoredVerdict(
        verdict_id=row["verdict_id"],
        number=row["number"],
        model=row["model"],
        use_case=row["use_case"],
        evidence=read_stored(Evidence, row["evidence"]),
        policy=read_stored(GovernorConfig, row["policy"]),
        stored_at=row["stored_at"],
        answered_at=row["answered_at"],
        num_asked=row["num_asked"],
    )


def read_stored(kind: type[Value], text: str) -> Value:
    """A stored value, whatever release wrote it: fields that this one does not know are left out.

    Raises:
        DataContractError: it lacks what this release needs.
    """
    told = {name: part for name, part in json.loads(text).items() if name in kind.model_fields}
    try:
        return kind.model_validate(told)
    except ValidationError as exc:
        raise DataContractError(
            f"a stored {kind.__name__} is not what this release reads ({exc.error_count()} "
            "errors); it was written by another release. Run the drift check of that window again"
        ) from exc


def count_asked(connection: Connection, verdict_id: str) -> None:
    """Count one more question about a verdict that has its answer."""
    table = tables.drift_results
    connection.execute(
        update(table)
        .where(table.c.verdict_id == verdict_id)
        .values(num_asked=func.coalesce(table.c.num_asked, 0) + 1)
    )
