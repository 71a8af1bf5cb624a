"""The record: verdicts that were stored, decisions, and how far each action has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Engine, RowMapping, Select, and_, case, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tasks.control.retraining.book import count_asked, lock, read_stored, read_verdict_row
from tasks.control.retraining.config import GovernorConfig
from tasks.control.retraining.decision import Action, Cause
from tasks.control.retraining.evidence import Evidence
from tasks.control.retraining.records import (
    Claim,
    ClaimState,
    Decision,
    Order,
    Outcome,
    RunEnd,
    StartedAction,
    StoredVerdict,
)
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import content_key
from tasks.metadata import database, tables

RESERVED_FOR = timedelta(minutes=15)
"""A claim that its platform has reserved and not started since is free for another one: three of
its sweeps have failed, so it is away."""


@dataclass(frozen=True)
class Wanted:
    """Which decisions to list; None means all."""

    model: str | None = None
    use_case: str | None = None
    action: Action | None = None
    outcome: Outcome | None = None
    since: datetime | None = None
    limit: int = 50


class Ledger:
    """The governor's database.

    Args:
        url: SQLAlchemy address of SQLite or PostgreSQL; tables that it lacks are made.

    Raises:
        ConfigurationError: the address is of another kind.
        TransientError: the database does not answer.
        StorageError: its disk refused.
    """

    def __init__(self, url: str) -> None:
        self.engine: Engine = database.open_database(url)

    def store_verdict(
        self, model: str, use_case: str, evidence: Evidence, policy: GovernorConfig
    ) -> StoredVerdict:
        """Keep a verdict under the digest of its content; the same one is kept once.

        Numbers are given under the model's lock, so verdicts are seen in their order.
        """
        verdict_id = verdict_id_of(model, use_case, evidence)
        with database.transaction(self.engine) as connection:
            lock(connection, model)
            dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
            row = {
                "verdict_id": verdict_id,
                "model": model,
                "use_case": use_case,
                "version": evidence.version,
                "verdict": evidence.verdict.value,
                "window_end": evidence.window.end,
                "evidence": evidence.model_dump_json(),
                "policy": policy.model_dump_json(),
                "stored_at": database.database_now(connection),
                "num_asked": 0,
            }
            table = tables.drift_results
            connection.execute(dialect.insert(table).values(row).on_conflict_do_nothing())
            query = select(table).where(table.c.verdict_id == verdict_id)
            return read_verdict_row(connection.execute(query).mappings().one())

    def verdict(self, verdict_id: str) -> StoredVerdict:
        """A stored verdict.

        Raises:
            DataContractError: there is none.
        """
        table = tables.drift_results
        with database.transaction(self.engine, reads_only=True) as connection:
            query = select(table).where(table.c.verdict_id == verdict_id)
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise DataContractError(
                f"no verdict {verdict_id!r} is stored in this database; expected one that a drift "
                "check stored here. Nothing was decided; check that drift check and governor use "
                "the same FALAJ_DATABASE_URL or state folder"
            )
        return read_verdict_row(row)

    def newest_verdict(self, model: str, use_case: str) -> StoredVerdict | None:
        """The verdict on a model that was stored last; None before the first."""
        table = tables.drift_results
        query = select(table).where(table.c.model == model, table.c.use_case == use_case)
        with database.transaction(self.engine, reads_only=True) as connection:
            newest = query.order_by(table.c.number.desc()).limit(1)
            row = connection.execute(newest).mappings().one_or_none()
        return read_verdict_row(row) if row is not None else None

    def count_asked(self, verdict_id: str) -> None:
        """Count one more question about an answered verdict."""
        with database.transaction(self.engine) as connection:
            count_asked(connection, verdict_id)

    def unsettled(self) -> list[tuple[str, str]]:
        """Models and use cases with unanswered verdicts, or trouble that nobody acts on yet."""
        verdicts, episodes, claims = tables.drift_results, tables.incidents, tables.actions
        unanswered = select(verdicts.c.model, verdicts.c.use_case).where(
            verdicts.c.answered_at.is_(None)
        )
        waiting = (
            select(episodes.c.model, episodes.c.use_case)
            .outerjoin(claims, claims.c.episode_id == episodes.c.episode_id)
            .where(
                episodes.c.closed_at.is_(None),
                claims.c.episode_id.is_(None),
                episodes.c.cause != Cause.FEED.value,
            )
        )
        with database.transaction(self.engine, reads_only=True) as connection:
            found = {
                tuple(row) for query in (unanswered, waiting) for row in connection.execute(query)
            }
        return sorted((model, use_case) for model, use_case in found)

    def claims(self, state: ClaimState, model: str | None = None) -> list[Claim]:
        """Claims in one state, the oldest first."""
        table, verdicts = tables.actions, tables.drift_results
        query = (
            select(table, verdicts.c.version, verdicts.c.evidence)
            .join(verdicts, verdicts.c.verdict_id == table.c.verdict_id)
            .where(table.c.state == state.value)
            .order_by(table.c.claimed_at)
        )
        if model is not None:
            query = query.where(table.c.model == model)
        with database.transaction(self.engine, reads_only=True) as connection:
            return [_read_claim(row) for row in connection.execute(query).mappings()]

    def reserve(self, episode_id: str, place: str) -> bool:
        """Keep a claim for one platform, which is about to start it.

        Args:
            episode_id: of the claim.
            place: names the platform, the same for all its processes.

        Returns:
            False where another one has reserved it, or it was started.
        """
        table = tables.actions
        with database.transaction(self.engine) as connection:
            now = database.database_now(connection)
            changed = connection.execute(
                update(table)
                .where(_may_be_started(episode_id, place, now))
                .values(place=place, started_at=now)
            )
            return changed.rowcount == 1

    def mark_started(self, episode_id: str, started: StartedAction) -> bool:
        """Note what carries an action out; False where somebody else did so, or will."""
        table = tables.actions
        with database.transaction(self.engine) as connection:
            now = database.database_now(connection)
            changed = connection.execute(
                update(table)
                .where(_may_be_started(episode_id, started.place, now))
                .values(
                    state=ClaimState.STARTED.value,
                    kind=started.kind,
                    place=started.place,
                    run_id=started.run_id,
                    started_at=now,
                    num_starts=table.c.num_starts + 1,
                    trouble=None,
                )
            )
            return changed.rowcount == 1

    def mark_trouble(self, episode_id: str, trouble: str) -> None:
        """Note why a start failed; the claim stays, and the sweep tries it again."""
        table = tables.actions
        with database.transaction(self.engine) as connection:
            connection.execute(
                update(table)
                .where(table.c.episode_id == episode_id, table.c.state == ClaimState.CLAIMED.value)
                .values(trouble=trouble, num_starts=table.c.num_starts + 1)
            )

    def take_up(self, episode_id: str, run_id: str) -> bool:
        """Make a run that was lost a claim again; False where somebody else has done so."""
        table = tables.actions
        with database.transaction(self.engine) as connection:
            changed = connection.execute(
                update(table)
                .where(
                    table.c.episode_id == episode_id,
                    table.c.state == ClaimState.STARTED.value,
                    table.c.run_id == run_id,
                )
                .values(
                    state=ClaimState.CLAIMED.value,
                    **dict.fromkeys(("kind", "place", "run_id", "started_at")),
                    trouble=f"run {run_id} was lost",
                )
            )
            return changed.rowcount == 1

    def mark_ended(self, episode_id: str, end: RunEnd, trouble: str | None = None) -> bool:
        """Note how the run of an action ended; False where that is known already."""
        table = tables.actions
        with database.transaction(self.engine) as connection:
            changed = connection.execute(
                update(table)
                .where(table.c.episode_id == episode_id, table.c.state == ClaimState.STARTED.value)
                .values(
                    state=ClaimState.ENDED.value,
                    ended_at=database.database_now(connection),
                    run_state=end.state,
                    run_seconds=end.seconds,
                    trouble=trouble,
                )
            )
            return changed.rowcount == 1

    def decisions(self, wanted: Wanted) -> list[Decision]:
        """Decisions and refusals, the newest first."""
        table = tables.decisions
        query = _with_runs().order_by(table.c.number.desc()).limit(wanted.limit)
        for column, value in (
            (table.c.model, wanted.model),
            (table.c.use_case, wanted.use_case),
            (table.c.action, wanted.action),
            (table.c.outcome, wanted.outcome),
        ):
            if value is not None:
                query = query.where(column == str(value))
        if wanted.since is not None:
            query = query.where(table.c.decided_at >= wanted.since)
        with database.transaction(self.engine, reads_only=True) as connection:
            return [_read_decision(row) for row in connection.execute(query).mappings()]

    def numbered(self, numbers: Sequence[int], verdict_id: str | None = None) -> list[Decision]:
        """Decisions by their numbers, and those about a verdict, the oldest first."""
        table = tables.decisions
        query = _with_runs().where(
            or_(table.c.number.in_(numbers), table.c.verdict_id == verdict_id)
        )
        with database.transaction(self.engine, reads_only=True) as connection:
            rows = connection.execute(query.order_by(table.c.number)).mappings()
            return [_read_decision(row) for row in rows]


def _may_be_started(episode_id: str, place: str, now: datetime) -> ColumnElement[bool]:
    """Claimed, and reserved by nobody else, or so long ago that who did it is away."""
    table = tables.actions
    free = or_(
        table.c.place.is_(None),
        table.c.place == place,
        table.c.started_at < now - RESERVED_FOR,
        table.c.started_at > now + RESERVED_FOR,  # the clock was set back
    )
    claimed = table.c.state == ClaimState.CLAIMED.value
    return and_(table.c.episode_id == episode_id, claimed, free)


def verdict_id_of(model: str, use_case: str, evidence: Evidence) -> str:
    """Digest of what a verdict says of which model; when the check was made does not matter."""
    said = evidence.model_copy(update={"champion_age_days": None})
    return content_key("verdict", model, use_case, said)


def _with_runs() -> Select[Any]:
    decisions, claims, verdicts = tables.decisions, tables.actions, tables.drift_results
    state = case((claims.c.run_state.is_not(None), claims.c.run_state), else_=claims.c.state)
    return (
        select(
            decisions,
            claims.c.run_id,
            state.label("run_state"),
            verdicts.c.version,
            verdicts.c.evidence,
        )
        .join(verdicts, verdicts.c.verdict_id == decisions.c.verdict_id)
        .outerjoin(claims, claims.c.episode_id == decisions.c.episode_id)
    )


def _read_decision(row: RowMapping) -> Decision:
    fields = {name: row[name] for name in Decision.model_fields if name != "evidence"}
    return Decision(**fields, evidence=read_stored(Evidence, row["evidence"]))


def _read_claim(row: RowMapping) -> Claim:
    started = None
    if row["run_id"] is not None:
        started = StartedAction(kind=row["kind"], run_id=row["run_id"], place=row["place"])
    end = None
    if row["run_state"] is not None:
        end = RunEnd(state=row["run_state"], seconds=row["run_seconds"])
    order = Order(
        episode_id=row["episode_id"],
        model=row["model"],
        use_case=row["use_case"],
        action=Action(row["action"]),
        version=row["version"],
        verdict_id=row["verdict_id"],
        evidence=read_stored(Evidence, row["evidence"]),
        reason=row["reason"],
    )
    return Claim(
        order=order,
        state=ClaimState(row["state"]),
        claimed_at=row["claimed_at"],
        started=started,
        end=end,
        num_starts=row["num_starts"],
        trouble=row["trouble"],
    )
