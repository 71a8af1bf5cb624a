"""What is stale and what to do about it: a pure function of what was seen.

Suspended and paused runs are never touched: they have no process and send no heartbeat, and wait
for a person.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
SWEPT = "Recovery sweep: "
"""What the message of each state that a sweep sets begins with."""
CANCEL_LIMIT_S = 20.0
LATE_LIMIT_S = 300.0
PENDING_LIMIT_S = 300.0
"""Between a worker's taking a run and the run's beginning as a process."""
POD_LIMIT_S = 3600.0
"""The same in a pool of another type: a node is added, and an image of gigabytes loaded."""
PARENT_GRACE_S = 30.0
"""A stage's run may go on after the loop that started it ended."""
LEFTOVER_GRACE_S = 30.0
TASK_RUN_GRACE_S = 120.0
"""The end of a task run may be recorded so long after that of its flow run."""
ENDED: frozenset[str] = frozenset({"completed", "failed", "crashed", "cancelled"})
ENDED_BADLY: frozenset[str] = frozenset({"failed", "crashed", "cancelled"})


@dataclass(frozen=True, kw_only=True)
class RunFact:
    """One flow run as it was seen at one moment.

    Attributes:
        age_s: seconds since it came into its state, or was due.
        process: of the process that noted the run as its own: `gone` only where this host and boot
            are named and the process is not there; `unknown` where none was noted.
        pids: processes here that belong to it.
        heartbeat_age_s: None: none has arrived.
        beats_s: seconds between its heartbeats; 0: it sends none, or an earlier release began it.
        attempts: how often it has begun.
        restarts: how often a sweep has started it again.
        retried: its flow may be started again; one that never began always.
        deployed: a worker started it, and can do so again.
        parent: run that called it.
        pool: its work pool.
        pool_type: such as `process`, `kubernetes`; None: not known.
    """

    id: str
    name: str
    flow: str
    state: RunState
    age_s: float
    process: ProcessState
    pids: tuple[int, ...] = ()
    heartbeat_age_s: float | None = None
    beats_s: float = 0
    attempts: int = 1
    restarts: int = 0
    retried: bool = True
    deployed: bool = True
    parent: str | None = None
    pool: str | None = None
    pool_type: str | None = None

    @property
    def tries(self) -> int:
        """How often it was to be run; it may have been cut off before it began."""
        return max(self.attempts, self.restarts + 1)


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What is to be done about one run, why, and what came of it.

    Attributes:
        pids: processes to be ended first.
        certain: False: a second look must confirm it.
    """

    run: str
    name: str
    flow: str
    action: Action
    why: str
    pids: tuple[int, ...] = ()
    certain: bool = True
    outcome: str = ""


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
    rules = {"running": _running, "cancelling": _cancelling, "pending": _pending}
    return rules[fact.state](fact, config) if fact.state in rules else None


def _running(fact: RunFact, config: RecoveryConfig) -> Repair | None:
    if fact.process == "alive":
        return None
    if fact.process == "gone":
        if fact.age_s <= DEAD_PROCESS_S:
            return None
        return _repair(fact, "crash", "the process that ran it is gone", fact.pids)
    silent_s = fact.heartbeat_age_s
    if silent_s is None and fact.beats_s:  # its host may be lost before the first has arrived
        silent_s = fact.age_s
    if fact.pids or silent_s is None:
        return None
    if min(silent_s, fact.age_s) <= max(config.heartbeat_limit_s, 3 * fact.beats_s):
        return None
    why = f"nothing was heard of it for {silent_s:.0f} s"
    if fact.heartbeat_age_s is not None:
        why = f"its last heartbeat is {silent_s:.0f} s old"
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
    limit_s = PENDING_LIMIT_S if fact.pool_type in {"process", None} else POD_LIMIT_S
    if fact.age_s <= limit_s or fact.pids or not fact.deployed:
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
    """A run that is given up is left as it is; `status` and a sweep list it."""
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
    return _was_cut_off(fact, config) and fact.tries <= config.max_retries


def _was_cut_off(fact: RunFact, config: RecoveryConfig) -> bool:
    return (
        fact.state == "crashed"
        and fact.deployed
        and fact.parent is None
        and fact.retried
        and fact.age_s <= config.retry_within_s
    )


def needs_a_person(
    fact: RunFact, config: RecoveryConfig, without_worker: Collection[str | None]
) -> str | None:
    """Why a person is to look at a run that no repair helps, and what to do; None where not.

    Args:
        fact: the run.
        config: when a run counts as lost.
        without_worker: work pools that have no worker online.
    """
    if fact.state == "scheduled" and fact.age_s > LATE_LIMIT_S and fact.pool in without_worker:
        return (
            f"it was due {fact.age_s:.0f} s ago and no worker of work pool {fact.pool!r} is online;"
            f" start one: falaj worker {fact.pool}"
        )
    is_unseen = fact.process in {"elsewhere", "unknown"} and not fact.pids
    if fact.state == "running" and is_unseen and fact.heartbeat_age_s is None:
        why = "it has been running for a day and never sent a heartbeat; look whether it lives"
        return why if fact.age_s > DAY_S else None
    if _was_cut_off(fact, config) and fact.tries > config.max_retries and not fact.pids:
        return (
            f"it was cut off {fact.tries} times and is not started again. Its log shows what it "
            f"was doing; to resume: falaj --on-platform retry {fact.name}"
        )
    return None


def _repair(
    fact: RunFact, action: Action, why: str, pids: tuple[int, ...] = (), *, certain: bool = True
) -> Repair:
    about = {"run": fact.id, "name": fact.name, "flow": fact.flow, "why": why}
    return Repair(**about, action=action, pids=pids, certain=certain)


@dataclass(frozen=True)
class SlotFact:
    """A deployment's concurrency limit, by name, and how many runs may hold its slots."""

    limit: str
    taken: int
    num_holders: int


def leaked_slots(first: Sequence[SlotFact], second: Sequence[SlotFact]) -> tuple[SlotFact, ...]:
    """Limits that had more slots taken than runs to hold them, at both looks.

    The larger number of runs of the two looks counts as holding a slot.
    """
    before, leaks = {fact.limit: fact for fact in first}, []
    for now in second:
        if then := before.get(now.limit):
            holders = max(then.num_holders, now.num_holders)
            if min(then.taken, now.taken) > holders:
                leaks.append(replace(now, num_holders=holders))
    return tuple(leaks)


@dataclass(frozen=True, kw_only=True)
class TaskRunFact:
    """A task run without an end, and the flow run that it belongs to.

    Attributes:
        age_s: seconds since it came into its state.
        attempt: of its flow run, in which it began.
        run: name of its flow run.
        run_age_s: as `RunFact.age_s`.
        stands_for_run: it stands for a flow run that has no end either.
    """

    id: str
    name: str
    age_s: float
    attempt: int
    run: str
    run_state: RunState
    run_age_s: float
    run_attempts: int
    stands_for_run: bool = False


def dead_task_runs(facts: Sequence[TaskRunFact]) -> tuple[TaskRunFact, ...]:
    """Task runs whose attempt is over: nobody will report their end."""
    return tuple(
        fact
        for fact in facts
        if not fact.stands_for_run
        and (fact.run_state in ENDED or fact.attempt < fact.run_attempts)
        and min(fact.age_s, fact.run_age_s) > TASK_RUN_GRACE_S
    )
