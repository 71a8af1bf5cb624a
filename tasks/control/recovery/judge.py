"""What is stale and what to do about it: a pure function of what was seen.

Suspended and paused runs are never touched: they have no process and send no heartbeat, and wait
for a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.control.config import RecoveryConfig

RunState = Literal[
    "scheduled",
    "pending",
    "running",
    "cancelling",
    "paused",
    "completed",
    "failed",
    "crashed",
    "cancelled",
]
ProcessState = Literal["alive", "gone", "elsewhere", "unknown"]
Action = Literal["crash", "cancel", "ask to cancel", "retry", "end processes"]
DAY_S = 86_400.0
DEAD_PROCESS_S = 15.0
"""A run may stay Running after its process here is gone: its worker reports it within that."""
CANCEL_LIMIT_S = 20.0
PENDING_LIMIT_S = 300.0
"""Between a worker's taking a run and the run's beginning."""
PARENT_GRACE_S = 30.0
"""A stage's run may go on after the loop that started it ended."""
LEFTOVER_GRACE_S = 30.0
TASK_RUN_GRACE_S = 120.0
"""The end of a task run may be recorded so long after that of its flow run."""
ENDED: frozenset[str] = frozenset({"completed", "failed", "crashed", "cancelled"})
ENDED_BADLY: frozenset[str] = frozenset({"failed", "crashed", "cancelled"})


class RunFact(BaseModel):
    """One flow run as it was seen at one moment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    name: str
    flow: str
    state: RunState
    age_s: float = Field(description="Seconds since it came into its state, or was due.")
    process: ProcessState = Field(
        description="Of the process that noted the run as its own: `gone` only where this host and "
        "boot are named and the process is not there; `unknown` where none was noted."
    )
    pids: tuple[int, ...] = Field(default=(), description="Processes here that belong to it.")
    heartbeat_age_s: float | None = Field(default=None, description="None: it never sent one.")
    attempts: int = Field(default=1, description="How often it has begun.")
    restarts: int = Field(default=0, description="How often a sweep has started it again.")
    retried: bool = Field(
        default=True, description="Its flow may be started again; one that never began always."
    )
    deployed: bool = Field(default=True, description="A worker started it, and can do so again.")
    parent: str | None = Field(default=None, description="Run that called it.")

    @property
    def tries(self) -> int:
        """How often it was to be run; it may have been cut off before it began."""
        return max(self.attempts, self.restarts + 1)


class Repair(BaseModel):
    """What is to be done about one run, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    name: str
    flow: str
    action: Action
    why: str
    pids: tuple[int, ...] = Field(default=(), description="Processes to be ended first.")
    certain: bool = Field(default=True, description="False: a second look must confirm it.")
    outcome: str = Field(default="", description="What came of it.")


def judge(facts: Sequence[RunFact], config: RecoveryConfig) -> tuple[Repair, ...]:
    """What to do about each run; at most one thing each, and nothing about most."""
    by_id = {fact.id: fact for fact in facts}
    repairs = (_judged(fact, by_id, config) for fact in facts)
    return tuple(repair for repair in repairs if repair is not None)


def _judged(fact: RunFact, by_id: Mapping[str, RunFact], config: RecoveryConfig) -> Repair | None:
    if fact.state == "paused":
        return None
    if fact.state in ENDED:
        return _leftover(fact) or _again(fact, config)
    parent = by_id.get(fact.parent or "")
    if parent is not None and (repair := _without_parent(fact, parent, config)):
        return repair
    rules = {
        "running": _running,
        "cancelling": _cancelling,
        "pending": _pending,
    }
    return rules[fact.state](fact, config) if fact.state in rules else None


def _running(fact: RunFact, config: RecoveryConfig) -> Repair | None:
    if fact.process == "alive":
        return None
    if fact.process == "gone":
        if fact.age_s <= DEAD_PROCESS_S:
            return None
        return _repair(fact, "crash", "the process that ran it is gone", fact.pids)
    if fact.pids:
        return None
    if fact.heartbeat_age_s is None:  # it sends none
        return None
    if fact.heartbeat_age_s <= config.heartbeat_limit_s or fact.age_s <= config.heartbeat_limit_s:
        return None
    why = f"its last heartbeat is {fact.heartbeat_age_s:.0f} s old"
    return _repair(fact, "crash", why, certain=False)


def _cancelling(fact: RunFact, config: RecoveryConfig) -> Repair | None:
    if fact.age_s <= CANCEL_LIMIT_S:
        return None
    if fact.pids:
        why = f"{len(fact.pids)} processes of it live on after {fact.age_s:.0f} s"
        return _repair(fact, "cancel", why, fact.pids)
    if fact.process == "gone" or not fact.deployed:
        return _repair(fact, "cancel", "its processes are gone, and nobody said so")
    limit_s = config.heartbeat_limit_s
    beating = fact.heartbeat_age_s is not None and fact.heartbeat_age_s <= limit_s
    if beating or (fact.process == "elsewhere" and fact.age_s <= limit_s):
        return None
    return _repair(fact, "cancel", f"nothing was heard of it for {fact.age_s:.0f} s")


def _pending(fact: RunFact, _: RecoveryConfig) -> Repair | None:
    if fact.age_s <= PENDING_LIMIT_S or fact.pids or not fact.deployed:
        return None
    why = f"a worker took it {fact.age_s:.0f} s ago and it has not begun"
    return _repair(fact, "crash", why)


def _without_parent(fact: RunFact, parent: RunFact, config: RecoveryConfig) -> Repair | None:
    """A stage whose loop has ended is ended too, unless the loop will take it up again."""
    if parent.state not in ENDED_BADLY or fact.state == "cancelling":
        return None
    if parent.age_s <= PARENT_GRACE_S or may_be_retried(parent, config):
        return None
    why = f"the run {parent.name} that called it ended {parent.state} {parent.age_s:.0f} s ago"
    if not fact.deployed:  # it lived in its parent's process
        return _repair(fact, "cancel" if parent.state == "cancelled" else "crash", why)
    return _repair(fact, "cancel" if fact.state == "scheduled" else "ask to cancel", why)


def _leftover(fact: RunFact) -> Repair | None:
    if not fact.pids or fact.age_s <= LEFTOVER_GRACE_S:
        return None
    why = f"{len(fact.pids)} processes live on {fact.age_s:.0f} s after it was {fact.state}"
    return _repair(fact, "end processes", why, fact.pids)


def _again(fact: RunFact, config: RecoveryConfig) -> Repair | None:
    """A run that is given up is left as it is; `status` lists it."""
    if fact.pids or not may_be_retried(fact, config):
        return None
    why = (
        f"it was cut off {fact.age_s:.0f} s ago, in attempt {fact.tries} of at most "
        f"{config.max_retries + 1}; it goes on from the stage that was cut off"
    )
    return _repair(fact, "retry", why)


def may_be_retried(fact: RunFact, config: RecoveryConfig) -> bool:
    """True where a run was cut off and policy starts it again.

    A stage's run is not: the loop that called it does so, or is itself retried.
    """
    return (
        fact.state == "crashed"
        and fact.deployed
        and fact.parent is None
        and fact.retried
        and fact.age_s <= config.retry_within_s
        and fact.tries <= config.max_retries
    )


def _repair(
    fact: RunFact, action: Action, why: str, pids: tuple[int, ...] = (), *, certain: bool = True
) -> Repair:
    about = {"run": fact.id, "name": fact.name, "flow": fact.flow}
    return Repair(**about, action=action, why=why, pids=pids, certain=certain)


class SlotFact(BaseModel):
    """A deployment's concurrency limit, and the runs that may hold its slots."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: str = Field(description="Name of the limit, `deployment:<id>`.")
    taken: int = Field(ge=0)
    num_holders: int = Field(ge=0, description="Runs that are pending, running or cancelling.")


def leaked_slots(first: Sequence[SlotFact], second: Sequence[SlotFact]) -> tuple[SlotFact, ...]:
    """Limits that had more slots taken than runs to hold them, at both looks.

    The larger number of runs of the two looks counts as holding a slot.
    """
    before, leaks = {fact.limit: fact for fact in first}, []
    for now in second:
        if then := before.get(now.limit):
            holders = max(then.num_holders, now.num_holders)
            if min(then.taken, now.taken) > holders:
                leaks.append(now.model_copy(update={"num_holders": holders}))
    return tuple(leaks)


class TaskRunFact(BaseModel):
    """A task run without an end, and the flow run that it belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    name: str
    age_s: float = Field(description="Seconds since it came into its state.")
    attempt: int = Field(description="Of its flow run, in which it began.")
    run: str = Field(description="Name of its flow run.")
    run_state: RunState
    run_age_s: float = Field(description="As `RunFact.age_s`.")
    run_attempts: int
    stands_for_run: bool = Field(
        default=False, description="It stands for a flow run that has no end either."
    )


def dead_task_runs(facts: Sequence[TaskRunFact]) -> tuple[TaskRunFact, ...]:
    """Task runs whose attempt is over: nobody will report their end."""
    return tuple(
        fact
        for fact in facts
        if not fact.stands_for_run
        and (fact.run_state in ENDED or fact.attempt < fact.run_attempts)
        and min(fact.age_s, fact.run_age_s) > TASK_RUN_GRACE_S
    )
