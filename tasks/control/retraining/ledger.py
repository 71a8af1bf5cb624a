"""The record of the retraining controller: drift results, incidents, decisions, and actions.

`Ledger` reads and writes single facts. `Incidents` is what one transaction knows of one model and
use case while it holds the model's lock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic import BaseModel, ValidationError

from tasks.contracts.base import RESULT
from tasks.contracts.drift import DayErrors
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining import records
from tasks.control.retraining.budget import KINDS, Spent
from tasks.control.retraining.decision import Action, Cause, Choice, Evidence
from tasks.kernel.errors import DataContractError
from tasks.kernel.process import boot_id
from tasks.kernel.settings import content_key
from tasks.metadata import database, tables

RESERVED_FOR = timedelta(minutes=15)
"""A claim that its platform has reserved and not started since is free for another one: three of
its sweeps have failed, so it is away."""
COLUMNS = {"incident_id": "episode_id"}
"""Fields of values, and the columns that had another name before them."""
Value = TypeVar("Value", bound=BaseModel)
_results, _incidents, _actions = tables.drift_results, tables.incidents, tables.actions
_uses = tables.uses


class Ledger:
    """The controller's tables in the metadata database.

    Every method may raise TransientError or StorageError: the database does not answer, or refuses.

    Args:
        url: SQLAlchemy address of SQLite or PostgreSQL.
        clock: shows what moment it is, UTC, where history is replayed; None: the database does.

    Raises:
        ConfigurationError: the address is of another kind.
    """

    def __init__(self, url: str, clock: Callable[[], datetime] | None = None) -> None:
        self.engine: sa.Engine = database.open_database(url)
        self._clock = clock

    def _moment(self, connection: sa.Connection) -> datetime:
        return self._clock() if self._clock else database.database_now(connection)

    def store_result(
        self, model: str, use_case: str, evidence: Evidence, policy: RetrainingPolicy
    ) -> records.StoredResult:
        """Keep a drift result under the digest of its content; the same one is kept once.

        Numbers are given under the model's lock, so results are seen in their order.
        """
        result_id = result_id_of(model, use_case, evidence)
        with database.transaction(self.engine) as connection:
            _lock(connection, model)
            database.insert_if_absent(
                connection,
                _results,
                result_id=result_id,
                model=model,
                use_case=use_case,
                version=evidence.version,
                result=evidence.result.value,
                window_end=evidence.window.end,
                evidence=evidence.model_dump_json(),
                policy=policy.model_dump_json(),
                stored_at=self._moment(connection),
            )
            query = sa.select(_results).where(_results.c.result_id == result_id)
            return _read(records.StoredResult, connection.execute(query).mappings().one())

    def result(self, result_id: str) -> records.StoredResult:
        """A stored drift result.

        Raises:
            DataContractError: there is none.
        """
        found = self._rows(sa.select(_results).where(_results.c.result_id == result_id))
        if not found:
            raise DataContractError(
                f"no drift result {result_id!r} is in this database; expected one that a drift "
                "check stored here. Nothing was decided; check that drift check and controller "
                "use the same FALAJ_DATABASE_URL or state folder"
            )
        return _read(records.StoredResult, found[0])

    def newest_result(self, model: str, use_case: str) -> records.StoredResult | None:
        """The result on a model that was stored last; None before the first."""
        query = sa.select(_results).where(_of(_results, model, use_case))
        found = self._rows(query.order_by(_results.c.number.desc()).limit(1))
        return _read(records.StoredResult, found[0]) if found else None

    def scored_days(self, model: str, use_case: str, version: int) -> list[DayErrors]:
        """Days that drift checks saw a version score, the check that was stored first first."""
        query = sa.select(_results.c.evidence).where(
            _of(_results, model, use_case), _results.c.version == version
        )
        found = self._rows(query.order_by(_results.c.number))
        return [day for row in found for day in _read_stored(Evidence, row["evidence"]).days]

    def unsettled(self) -> list[tuple[str, str]]:
        """Models and use cases with unanswered drift results, or incidents without an action."""
        unanswered = sa.select(_results.c.model, _results.c.use_case).where(
            _results.c.answered_at.is_(None)
        )
        waiting = (
            sa.select(_incidents.c.model, _incidents.c.use_case)
            .outerjoin(_actions, _actions.c.episode_id == _incidents.c.episode_id)
            .where(
                _incidents.c.closed_at.is_(None),
                _actions.c.episode_id.is_(None),
                _incidents.c.cause != Cause.FEED.value,
            )
        )
        found = self._rows(unanswered.union(waiting))
        return sorted((row["model"], row["use_case"]) for row in found)

    def claims(self, state: records.ClaimState, model: str | None = None) -> list[records.Claim]:
        """Claims in one state, the oldest first."""
        query = (
            sa.select(_actions, _results.c.version, _results.c.evidence)
            .join(_results, _results.c.result_id == _actions.c.result_id)
            .where(_actions.c.state == state.value)
            .order_by(_actions.c.claimed_at)
        )
        if model is not None:
            query = query.where(_actions.c.model == model)
        return [_read_claim(row) for row in self._rows(query)]

    def reserve(self, incident_id: str, place: str) -> bool:
        """Keep a claim for one platform, which is about to start it.

        Args:
            incident_id: of the claim.
            place: names the platform, the same for all its processes.

        Returns:
            False where another one has reserved it, or it was started.
        """
        now = self._now()
        return self._change(_may_be_started(incident_id, place, now), place=place, started_at=now)

    def mark_started(self, incident_id: str, started: records.StartedAction) -> bool:
        """Note what carries an action out; False where somebody else did so, or will."""
        now = self._now()
        return self._change(
            _may_be_started(incident_id, started.place, now),
            state=records.ClaimState.STARTED.value,
            **started.model_dump(),
            started_at=now,
            trouble=None,
        )

    def take_up(self, incident_id: str, run_id: str) -> bool:
        """Make a run that was lost a claim again; False where somebody else has done so."""
        return self._change(
            _in_state(incident_id, records.ClaimState.STARTED) & (_actions.c.run_id == run_id),
            state=records.ClaimState.CLAIMED.value,
            **dict.fromkeys(("kind", "place", "run_id", "started_at")),
            trouble=f"run {run_id} was lost",
        )

    def mark_ended(self, incident_id: str, end: records.RunEnd, trouble: str | None = None) -> bool:
        """Note how the run of an action ended; False where that is known already."""
        return self._change(
            _in_state(incident_id, records.ClaimState.STARTED),
            state=records.ClaimState.ENDED.value,
            ended_at=self._now(),
            run_state=end.state,
            run_seconds=end.seconds,
            trouble=trouble,
        )

    def decisions(
        self, *, since: datetime | None = None, limit: int = 50, **wanted: str | None
    ) -> list[records.Decision]:
        """Decisions and refusals, the newest first.

        Args:
            since: the first moment.
            limit: at most so many.
            wanted: value by column (`model`, `use_case`, `action`, `outcome`); None: any.
        """
        table = tables.decisions
        query = _with_runs().order_by(table.c.number.desc()).limit(limit)
        for name, value in wanted.items():
            if value is not None:
                query = query.where(table.c[name] == str(value))
        if since is not None:
            query = query.where(table.c.decided_at >= since)
        return [_read(records.Decision, row) for row in self._rows(query)]

    def numbered(
        self, numbers: Sequence[int], result_id: str | None = None
    ) -> list[records.Decision]:
        """Decisions by their numbers, and those about a drift result, the oldest first."""
        table = tables.decisions
        query = _with_runs().where(
            sa.or_(table.c.number.in_(numbers), table.c.result_id == result_id)
        )
        return [_read(records.Decision, row) for row in self._rows(query.order_by(table.c.number))]

    @contextmanager
    def deciding(self, model: str, use_case: str, actor: str) -> Iterator[Incidents]:
        """Be the only one who decides about this model and use case, in one transaction."""
        with database.transaction(self.engine) as connection:
            _lock(connection, model)
            now = self._clock() if self._clock else None
            yield Incidents(connection, model, use_case, actor, now)

    def _now(self) -> datetime:
        with database.transaction(self.engine, reads_only=True) as connection:
            return self._moment(connection)

    def _rows(self, query: Any) -> list[sa.RowMapping]:
        with database.transaction(self.engine, reads_only=True) as connection:
            return list(connection.execute(query).mappings())

    def _change(self, which: sa.ColumnElement[bool], **values: Any) -> bool:
        """Change one action; False where none is so."""
        with database.transaction(self.engine) as connection:
            changed = connection.execute(sa.update(_actions).where(which).values(values))
            return changed.rowcount == 1


@dataclass(frozen=True)
class Incident:
    """One stretch of trouble of one cause, and whether its one action was claimed."""

    incident_id: str
    version: int
    cause: Cause
    newest: str
    """Id of the latest result that showed it."""
    is_claimed: bool
    recalibrated: bool = False
    """Its action was a recalibration, and has ended."""
    retrained_at: datetime | None = None
    """When its retraining was claimed, which has ended; None for none."""


class Incidents:
    """The rows of one model and use case, while its lock is held; see `Ledger.deciding`.

    Args:
        connection: a transaction that holds the lock.
        model: registered model.
        use_case: name of the use case.
        actor: who asks, as the record names it.
        now: the moment of a replay, UTC; None: as the database shows it.
    """

    def __init__(
        self,
        connection: sa.Connection,
        model: str,
        use_case: str,
        actor: str,
        now: datetime | None = None,
    ) -> None:
        self._execute = connection.execute
        self.model, self.use_case, self.actor = model, use_case, actor
        self.now = now or database.database_now(connection)
        # A clock that nobody can set; it is the same for all processes of one boot.
        self._boot, self._uptime_s = boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME)
        if now is not None:
            self._boot, self._uptime_s = "replay", now.timestamp()
        # Where the clock was set back, what was claimed "later" counts from now on. Else a clock
        # that had been years ahead would hold every cool-down for years.
        later = (_actions.c.model == model) & (_actions.c.claimed_at > self.now)
        self._execute(sa.update(_actions).where(later).values(claimed_at=self.now))

    def unanswered(self) -> list[records.StoredResult]:
        """Results without an answer, in the order in which they were stored."""
        open_ones = self._mine(_results) & _results.c.answered_at.is_(None)
        rows = self._execute(sa.select(_results).where(open_ones).order_by(_results.c.number))
        return [_read(records.StoredResult, row) for row in rows.mappings()]

    def result(self, result_id: str) -> records.StoredResult:
        """One stored drift result."""
        query = sa.select(_results).where(_results.c.result_id == result_id)
        return _read(records.StoredResult, self._execute(query).mappings().one())

    def latest_window_end(self) -> datetime | None:
        """End of the latest window that was answered."""
        answered = self._mine(_results) & _results.c.answered_at.is_not(None)
        query = sa.select(_results.c.window_end).where(answered)
        return self._execute(
            query.order_by(_results.c.window_end.desc()).limit(1)
        ).scalar_one_or_none()

    def mark_answered(self, result_id: str) -> None:
        """Note that the result has its answer."""
        change = sa.update(_results).where(_results.c.result_id == result_id)
        self._execute(change.values(answered_at=self.now))

    def open_ones(self) -> list[Incident]:
        """Incidents that have not been closed, the oldest first."""
        rows = self._execute(
            sa.select(_incidents, _actions.c.action, _actions.c.state, _actions.c.claimed_at)
            .outerjoin(_actions, _actions.c.episode_id == _incidents.c.episode_id)
            .where(self._mine(_incidents), _incidents.c.closed_at.is_(None))
            .order_by(_incidents.c.opened_at, _incidents.c.episode_id)
        )
        return [
            Incident(
                incident_id=row["episode_id"],
                version=row["version"],
                cause=Cause(row["cause"]),
                newest=row["newest"],
                is_claimed=row["state"] is not None,
                recalibrated=done == Action.RECALIBRATE,
                retrained_at=row["claimed_at"] if done == Action.RETRAIN else None,
            )
            for row in rows.mappings()
            for done in [row["action"] if row["state"] == records.ClaimState.ENDED else None]
        ]

    def of(self, result: records.StoredResult, cause: Cause) -> Incident:
        """The open incident of this cause, or a new one; the result is its newest."""
        newest, version = result.result_id, result.evidence.version
        for known in self.open_ones():
            if known.cause is cause:
                self._update(known, newest=newest)
                return known
        incident_id = content_key("episode", self.model, self.use_case, cause, newest)
        self._execute(
            sa.insert(_incidents).values(
                episode_id=incident_id,
                model=self.model,
                use_case=self.use_case,
                version=version,
                cause=cause.value,
                opened_by=newest,
                newest=newest,
                opened_at=self.now,
            )
        )
        return Incident(incident_id, version, cause, newest, is_claimed=False)

    def close(self, incident: Incident, by: str) -> None:
        """End an incident: the next bad result of its cause opens another one."""
        self._update(incident, closed_at=self.now, closed_by=by)

    def spent(self) -> list[Spent]:
        """Retrainings and recalibrations of the model that were claimed before, oldest first."""
        rows = self._execute(
            sa.select(_actions, _results.c.version, self._amount().label("amount"))
            .join(_results, _results.c.result_id == _actions.c.result_id)
            .where(_actions.c.model == self.model)
            .where(_actions.c.action.in_([action.value for action in KINDS]))
            .order_by(_actions.c.claimed_at)
        )
        return [
            Spent(
                claimed_at=self._when_claimed(row),
                seconds=row["run_seconds"],
                action=Action(row["action"]),
                version=row["version"],
                has_ended=row["state"] == records.ClaimState.ENDED.value,
                amount=row["amount"],
            )
            for row in rows.mappings()
        ]

    def _amount(self) -> sa.ScalarSelect[float | None]:
        """Money of an action's run and all inside it; in a process of its own, of that time."""
        until = sa.func.coalesce(_actions.c.ended_at, sa.literal(self.now, tables.UtcTime))
        inside = _uses.c.started.between(_actions.c.claimed_at, until)
        here = (_actions.c.kind == "in_process") & (_uses.c.model == _actions.c.model) & inside
        there = (_actions.c.kind == "deployment") & (_uses.c.root_id == _actions.c.run_id)
        which = there | here
        return sa.select(sa.func.sum(_uses.c.amount)).where(which).scalar_subquery()

    def _when_claimed(self, row: sa.RowMapping) -> datetime:
        """As the clock shows it that is set now, however wrong it was then."""
        if row["boot"] != self._boot:  # only the database's clock is left
            claimed_at: datetime = row["claimed_at"]
            return claimed_at
        return self.now - timedelta(seconds=self._uptime_s - row["uptime_s"])

    def claim(self, incident: Incident, action: Action, result_id: str, reason: str) -> None:
        """Take the one action of an incident; the primary key lets nobody take it twice."""
        self._execute(
            sa.insert(_actions).values(
                episode_id=incident.incident_id,
                model=self.model,
                use_case=self.use_case,
                action=action.value,
                result_id=result_id,
                reason=reason,
                state=records.ClaimState.CLAIMED.value,
                claimed_at=self.now,
                claimed_by=self.actor,
                boot=self._boot,
                uptime_s=self._uptime_s,
            )
        )

    def write(
        self,
        result_id: str,
        choice: Choice,
        outcome: records.Outcome,
        reason: str,
        incident: Incident | None = None,
        carried_out_as: Action | None = None,
    ) -> int:
        """Add one row to the record; returns its number."""
        made = self._execute(
            sa.insert(tables.decisions)
            .values(
                decided_at=self.now,
                model=self.model,
                use_case=self.use_case,
                result_id=result_id,
                episode_id=incident.incident_id if incident else None,
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

    def last_outcome(self, incident: Incident) -> records.Outcome | None:
        """Outcome of the latest row about an incident."""
        table = tables.decisions
        query = sa.select(table.c.outcome).where(table.c.episode_id == incident.incident_id)
        found = self._execute(query.order_by(table.c.number.desc()).limit(1)).scalar_one_or_none()
        return None if found is None else records.Outcome(found)

    def _mine(self, table: sa.Table) -> sa.ColumnElement[bool]:
        return _of(table, self.model, self.use_case)

    def _update(self, incident: Incident, **values: Any) -> None:
        which = _incidents.c.episode_id == incident.incident_id
        self._execute(sa.update(_incidents).where(which).values(values))


def result_id_of(model: str, use_case: str, evidence: Evidence) -> str:
    """Digest of a drift result and its model; when the check was made does not matter."""
    content = evidence.model_dump(mode="json") | {"champion_age_days": None}
    # What was stored before a field was renamed, or was there, is no new result.
    content["verdict"] = content.pop("result")
    if evidence.can_be_mapped:
        del content["can_be_mapped"]
    if not evidence.days:
        del content["days"]
    if evidence.train_days is None:
        del content["train_days"], content["train_growth"]
    return content_key("verdict", model, use_case, content)


def _of(table: sa.Table, model: str, use_case: str) -> sa.ColumnElement[bool]:
    return sa.and_(table.c.model == model, table.c.use_case == use_case)


def _in_state(incident_id: str, state: records.ClaimState) -> sa.ColumnElement[bool]:
    return sa.and_(_actions.c.episode_id == incident_id, _actions.c.state == state.value)


def _may_be_started(incident_id: str, place: str, now: datetime) -> sa.ColumnElement[bool]:
    """Claimed, and reserved by nobody else, or so long ago that who did it is away."""
    free = sa.or_(
        _actions.c.place.is_(None),
        _actions.c.place == place,
        _actions.c.started_at < now - RESERVED_FOR,
        _actions.c.started_at > now + RESERVED_FOR,  # the clock was set back
    )
    return _in_state(incident_id, records.ClaimState.CLAIMED) & free


def _lock(connection: sa.Connection, model: str) -> None:
    """Hold the row of a model until the transaction ends."""
    table = tables.models
    database.insert_if_absent(connection, table, model=model)
    connection.execute(sa.select(table).where(table.c.model == model).with_for_update()).all()


def _with_runs() -> sa.Select[Any]:
    decisions = tables.decisions
    return (
        sa.select(
            decisions,
            _actions.c.run_id,
            sa.func.coalesce(_actions.c.run_state, _actions.c.state).label("run_state"),
            _results.c.version,
            _results.c.evidence,
        )
        .join(_results, _results.c.result_id == decisions.c.result_id)
        .outerjoin(_actions, _actions.c.episode_id == decisions.c.episode_id)
    )


def _read(kind: type[Value], row: sa.RowMapping) -> Value:
    return kind(**_fields(kind, row))


def _fields(kind: type[BaseModel], row: sa.RowMapping) -> dict[str, Any]:
    """The columns of a row that are fields of a value, those of JSON read."""
    columns = {name: COLUMNS.get(name, name) for name in kind.model_fields}
    fields = {name: row[column] for name, column in columns.items() if column in row}
    for name, inner in (("evidence", Evidence), ("policy", RetrainingPolicy)):
        if name in fields:
            fields[name] = _read_stored(inner, fields[name])
    return fields


def _read_claim(row: sa.RowMapping) -> records.Claim:
    started = end = None
    if row["run_id"] is not None:
        started = _read(records.StartedAction, row)
    if row["run_state"] is not None:
        end = records.RunEnd(state=row["run_state"], seconds=row["run_seconds"])
    return records.Claim(
        **_fields(records.Claim, row), order=_read(records.Order, row), started=started, end=end
    )


def _read_stored(kind: type[Value], text: str) -> Value:
    """A stored value, whatever release wrote it: fields that this one does not know are left out.

    Raises:
        DataContractError: it lacks what this release needs.
    """
    names = {*kind.model_fields, *RESULT.choices}
    known = {name: part for name, part in json.loads(text).items() if name in names}
    try:
        return kind.model_validate(known)
    except ValidationError as exc:
        raise DataContractError(
            f"a stored {kind.__name__} is not what this release reads ({exc.error_count()} "
            "errors); it was written by another release. Run the drift check of that window again"
        ) from exc
