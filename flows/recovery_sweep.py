"""Sweep: find runs that a kill or a stop left behind, put them right, and tell what was done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterId,
    FlowRunFilterParentTaskRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterId,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.events.filters import (
    EventFilter,
    EventNameFilter,
    EventOccurredFilter,
    EventOrder,
    EventResourceFilter,
)
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed
from pydantic import BaseModel, ConfigDict, Field

from flows.process_labels import HOST, NOT_RETRIED, found_but_not_retried, process_of
from flows.routing import is_online
from tasks.control.recovery.config import RecoveryConfig
from tasks.control.recovery.judge import (
    DAY_S,
    LATE_LIMIT_S,
    PARENT_GRACE_S,
    Action,
    ProcessState,
    Repair,
    RunFact,
    RunState,
    SlotFact,
    StepFact,
    dead_steps,
    judge,
    leaked_slots,
)
from tasks.control.recovery.processes import end_processes, is_engine, processes_by_run
from tasks.kernel.process import ProcessName
from tasks.kernel.retry_policy import RETRIED
from tasks.kernel.settings import Settings


class Done(BaseModel):
    """One repair and what came of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repair: Repair
    outcome: str


class Sweep(BaseModel):
    """What a sweep saw and did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_seen: int
    done: tuple[Done, ...] = ()
    slots: tuple[SlotFact, ...] = ()
    steps: tuple[StepFact, ...] = Field(
        default=(), description="Task runs of attempts that are over, ended."
    )
    leases: tuple[str, ...] = Field(default=(), description="Device leases of dead holders, freed.")


@flow(
    name="recovery-sweep",
    flow_run_name="sweep",
    persist_result=True,
    result_serializer="json",
    **found_but_not_retried("its next run by schedule does the same"),
)
def recovery_sweep_flow(config: RecoveryConfig = RecoveryConfig()) -> Sweep:  # noqa: B008  frozen
    """Put stale runs right: end, free, start again, or tell.

    Args:
        config: When a run counts as lost.
    """
    return sweep_stale_runs(config)


@task(
    name="sweep-stale-runs",
    **RETRIED,
    cache_policy=NO_CACHE,
    persist_result=True,
    result_serializer="json",
)
def sweep_stale_runs(config: RecoveryConfig) -> Sweep:
    """Look, judge and repair.

    Safe to retry: each run is read again right before it is changed, and a run that has moved on is
    left alone.
    """
    with get_client(sync_client=True) as client:
        sweep = sweep_once(client, config)
    sweep = sweep.model_copy(update={"leases": free_leases(Settings.from_environment())})
    logger = get_run_logger()
    for done in sweep.done:
        logger.warning("%s %s: %s", done.repair.name, done.outcome, done.repair.why)
    for slot in sweep.slots:
        logger.warning("%s: freed %d slots", slot.limit, slot.taken - slot.num_holders)
    if sweep.steps:
        logger.warning("ended %d task runs of attempts that are over", len(sweep.steps))
    for lease in sweep.leases:
        logger.warning("freed the lease of %s: its holder is dead", lease)
    _show(sweep)
    return sweep


def free_leases(settings: Settings) -> tuple[str, ...]:
    """Free the device leases whose holders on this host are dead; says whose they were."""
    from tasks.control.leases.repository import LeaseRepository

    return tuple(str(claim) for claim in LeaseRepository(settings.metadata_url).free_ended())


def find_repairs(client: SyncPrefectClient, config: RecoveryConfig) -> tuple[Repair, ...]:
    """What a sweep would do now; changes nothing."""
    return judge(run_facts(client, config, utc_now()), config)


def find_dead_steps(client: SyncPrefectClient) -> tuple[StepFact, ...]:
    """Task runs that a sweep would end now; changes nothing."""
    return dead_steps(step_facts(client, utc_now()))


def _end_steps(client: SyncPrefectClient) -> tuple[StepFact, ...]:
    steps = find_dead_steps(client)
    for step in steps:
        message = f"{SWEPT}attempt {step.attempt} of {step.run} is over."
        state = Cancelled if step.run_state == "cancelled" else Crashed
        client.set_task_run_state(UUID(step.id), state(message=message), force=True)
    return steps


def sweep_once(client: SyncPrefectClient, config: RecoveryConfig) -> Sweep:
    """Repair what is certain at once, and the rest where a second look confirms it."""
    facts, slots = run_facts(client, config, utc_now()), slot_facts(client)
    repairs = judge(facts, config)
    done = list(_repaired(client, repairs, facts, config))
    suspects = {repair.run for repair in repairs if not repair.certain}
    if suspects or any(slot.taken > slot.num_holders for slot in slots):
        time.sleep(config.second_look_s)
        again = run_facts(client, config, utc_now())
        found = judge(again, config)
        confirmed = tuple(
            r.model_copy(update={"certain": True}) for r in found if r.certain or r.run in suspects
        )
        done += _repaired(client, confirmed, again, config)
    leaks = leaked_slots(slots, slot_facts(client))
    for leak in leaks:
        freed = GlobalConcurrencyLimitUpdate(active_slots=leak.num_holders)
        client.update_global_concurrency_limit(leak.limit, freed)
    if any(each.repair.action == "crash" for each in done):
        later = run_facts(client, config, utc_now())
        retries = tuple(r for r in judge(later, config) if r.action == "retry")
        done += _repaired(client, retries, later, config)
    steps = _end_steps(client)
    return Sweep(num_seen=len(facts), done=tuple(done), slots=leaks, steps=steps)


def _repaired(
    client: SyncPrefectClient,
    repairs: tuple[Repair, ...],
    facts: tuple[RunFact, ...],
    config: RecoveryConfig,
) -> Iterator[Done]:
    seen = {fact.id: fact for fact in facts}
    for repair in repairs:
        if repair.certain:
            yield Done(repair=repair, outcome=_carry_out(client, repair, seen[repair.run], config))


def _carry_out(
    client: SyncPrefectClient, repair: Repair, fact: RunFact, config: RecoveryConfig
) -> str:
    """Do one repair, unless the run has moved on since it was seen; returns what came of it."""
    if repair.action == "report":
        return "told"
    run = client.read_flow_run(UUID(repair.run))
    moved_on = run.state is None or STATES[run.state.type] != fact.state
    if moved_on or run.run_count != fact.attempts:
        return "moved on by itself"
    if left := end_processes(repair.run, repair.pids):
        return f"could not be ended: processes {', '.join(map(str, left))}"
    state = _new_state(repair)
    if state is None:
        return "processes ended"
    set_to = client.set_flow_run_state(run.id, state).state
    return f"is {set_to.name if set_to else state.name}"


def _new_state(repair: Repair) -> State[Any] | None:
    message = f"{SWEPT}{repair.why}."
    made: dict[Action, State[Any] | None] = {
        "crash": Crashed(message=message),
        "cancel": Cancelled(message=message),
        "ask to cancel": Cancelling(message=message),
        "retry": AwaitingRetry(message=message),
        "end processes": None,
        "report": None,
    }
    return made[repair.action]


def _show(sweep: Sweep) -> None:
    """A table of the repairs in the UI; none where there was nothing to do."""
    rows = [
        {"run": d.repair.name, "flow": d.repair.flow, "outcome": d.outcome, "why": d.repair.why}
        for d in sweep.done
    ]
    rows += [
        {
            "run": slot.limit,
            "flow": "",
            "outcome": f"{slot.taken - slot.num_holders} slots freed",
            "why": f"{slot.taken} were taken and {slot.num_holders} runs held one",
        }
        for slot in sweep.slots
    ]
    rows += [
        {
            "run": step.run,
            "flow": "",
            "outcome": f"task run {step.name} ended",
            "why": "its attempt is over",
        }
        for step in sweep.steps
    ]
    rows += [
        {"run": lease, "flow": "", "outcome": "lease freed", "why": "its holder is dead"}
        for lease in sweep.leases
    ]
    if rows:
        create_table_artifact(key="recovery", table=rows, description="Repairs of one sweep")


PAGE = 200
UNFINISHED = [StateType.RUNNING, StateType.CANCELLING, StateType.PENDING]
HOLDING = UNFINISHED
HEARTBEAT = "prefect.flow-run.heartbeat"
SWEPT = "Recovery sweep: "
"""What the message of each state that a sweep sets begins with."""
STATES: dict[StateType, RunState] = {
    StateType.SCHEDULED: "scheduled",
    StateType.PENDING: "pending",
    StateType.RUNNING: "running",
    StateType.CANCELLING: "cancelling",
    StateType.PAUSED: "paused",
    StateType.COMPLETED: "completed",
    StateType.FAILED: "failed",
    StateType.CRASHED: "crashed",
    StateType.CANCELLED: "cancelled",
}


def run_facts(
    client: SyncPrefectClient, config: RecoveryConfig, now: datetime
) -> tuple[RunFact, ...]:
    """All runs about which something may have to be done, and those that called them."""
    local = processes_by_run()
    runs = {run.id: run for run in _candidates(client, config, local, now)}
    parents = _parents(client, list(runs.values()))
    missing = [UUID(p) for p in parents.values() if UUID(p) not in runs]
    runs |= {run.id: run for run in _by_id(client, missing)}
    flows = {run.flow_id for run in runs.values()}
    names = {flow: client.read_flow(flow).name for flow in flows}
    online = {
        pool: _num_online(client, pool, now)
        for pool in {run.work_pool_name for run in runs.values()}
        if pool is not None
    }
    return tuple(
        _fact(client, run, names[run.flow_id], local, parents, online, now)
        for run in runs.values()
        if run.state is not None
    )


def step_facts(client: SyncPrefectClient, now: datetime) -> tuple[StepFact, ...]:
    """All task runs without an end, and how their flow runs stand."""
    wanted = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=UNFINISHED)))
    steps = list(_all_steps(client, wanted))
    ids = {step.flow_run_id for step in steps if step.flow_run_id}
    runs: dict[UUID | None, FlowRun] = {run.id: run for run in _by_id(client, list(ids))}
    living = {
        run.parent_task_run_id
        for run in _called_by(client, [step.id for step in steps])
        if run.state is not None and not run.state.is_final()
    }
    return tuple(
        StepFact(
            id=str(step.id),
            name=step.name,
            age_s=(now - step.state.timestamp).total_seconds(),
            attempt=step.flow_run_run_count,
            run=run.name,
            run_state=STATES[run.state.type],
            run_age_s=_age_s(run, now),
            run_attempts=run.run_count,
            stands_for_run=step.id in living,
        )
        for step in steps
        if (run := runs.get(step.flow_run_id)) and run.state is not None and step.state is not None
    )


def slot_facts(client: SyncPrefectClient) -> tuple[SlotFact, ...]:
    """Taken slots of all deployments with a limit, and the runs that may hold them."""
    facts = []
    for limit in _limits(client):
        kind, _, deployment = limit.name.partition(":")
        if kind != "deployment" or not limit.active_slots:
            continue
        holding = FlowRunFilter(state=_of_type(HOLDING))
        wanted = DeploymentFilter(id=DeploymentFilterId(any_=[UUID(deployment)]))
        held = client.count_flow_runs(flow_run_filter=holding, deployment_filter=wanted)
        facts.append(SlotFact(limit=limit.name, taken=int(limit.active_slots), num_holders=held))
    return tuple(facts)


def _fact(
    client: SyncPrefectClient,
    run: FlowRun,
    flow: str,
    local: Mapping[str, Sequence[int]],
    parents: Mapping[UUID, str],
    online: Mapping[str, int],
    now: datetime,
) -> RunFact:
    pids = tuple(local.get(str(run.id), ()))
    process = _process(run, pids)
    is_seen = process in {"alive", "gone"}
    assert run.state is not None
    return RunFact(
        id=str(run.id),
        name=run.name,
        flow=flow,
        state=STATES[run.state.type],
        age_s=_age_s(run, now),
        process=process,
        pids=pids,
        heartbeat_age_s=None if is_seen else _heartbeat_age_s(client, run, now),
        attempts=run.run_count,
        restarts=0 if run.run_count else _num_restarts(client, run),
        retried=not run.run_count or (HOST in run.labels and NOT_RETRIED not in run.labels),
        deployed=run.deployment_id is not None,
        parent=parents.get(run.id) or ("unknown" if run.parent_task_run_id else None),
        pool=run.work_pool_name,
        num_workers_online=online.get(run.work_pool_name or ""),
    )


def _candidates(
    client: SyncPrefectClient,
    config: RecoveryConfig,
    local: Mapping[str, Sequence[int]],
    now: datetime,
) -> Iterator[FlowRun]:
    due = now - timedelta(seconds=min(LATE_LIMIT_S, PARENT_GRACE_S))
    cut_off = now - timedelta(seconds=config.retry_within_s)
    yield from _all(client, FlowRunFilter(state=_of_type(UNFINISHED)))
    yield from _all(
        client,
        FlowRunFilter(
            state=_of_type([StateType.SCHEDULED]),
            expected_start_time=FlowRunFilterExpectedStartTime.model_validate({"before_": due}),
        ),
    )
    yield from _all(
        client,
        FlowRunFilter(
            state=_of_type([StateType.CRASHED]),
            end_time=FlowRunFilterEndTime.model_validate({"after_": cut_off}),
        ),
    )
    yield from _by_id(client, [UUID(run) for run in local])


def _all(client: SyncPrefectClient, wanted: FlowRunFilter) -> Iterator[FlowRun]:
    offset = 0
    while page := client.read_flow_runs(flow_run_filter=wanted, limit=PAGE, offset=offset):
        yield from page
        offset += len(page)


def _by_id(client: SyncPrefectClient, ids: Sequence[UUID]) -> Iterator[FlowRun]:
    if ids:
        yield from _all(client, FlowRunFilter(id=FlowRunFilterId(any_=list(ids))))


def _all_steps(client: SyncPrefectClient, wanted: TaskRunFilter) -> Iterator[TaskRun]:
    offset = 0
    while page := client.read_task_runs(task_run_filter=wanted, limit=PAGE, offset=offset):
        yield from page
        offset += len(page)


def _called_by(client: SyncPrefectClient, steps: Sequence[UUID]) -> Iterator[FlowRun]:
    """Flow runs that these task runs stand for."""
    for start in range(0, len(steps), PAGE):
        wanted = FlowRunFilterParentTaskRunId(any_=list(steps[start : start + PAGE]))
        yield from _all(client, FlowRunFilter(parent_task_run_id=wanted))


def _num_restarts(client: SyncPrefectClient, run: FlowRun) -> int:
    """How often a sweep has started a run again that never began: the server does not count it."""
    if run.state is None or not run.state.is_crashed():
        return 0
    states = client.read_flow_run_states(run.id)
    return sum(s.name == "AwaitingRetry" and (s.message or "").startswith(SWEPT) for s in states)


def _of_type(types: list[StateType]) -> FlowRunFilterState:
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=types))


def _parents(client: SyncPrefectClient, runs: Iterable[FlowRun]) -> dict[UUID, str]:
    """Run to the run that called it; runs of which the server does not know it yet are absent."""
    called_by = {run.parent_task_run_id: run.id for run in runs if run.parent_task_run_id}
    ids, found = list(called_by), {}
    for start in range(0, len(ids), PAGE):
        wanted = TaskRunFilter(id=TaskRunFilterId(any_=ids[start : start + PAGE]))
        for task_run in client.read_task_runs(task_run_filter=wanted, limit=PAGE):
            if task_run.flow_run_id:
                found[called_by[task_run.id]] = str(task_run.flow_run_id)
    return found


def _age_s(run: FlowRun, now: datetime) -> float:
    """Seconds since the run came into its state; of a scheduled one, since it was due."""
    assert run.state is not None
    since = run.state.timestamp
    if run.state.type == StateType.SCHEDULED:
        since = run.next_scheduled_start_time or run.expected_start_time or since
    return (now - since).total_seconds()


def _process(run: FlowRun, pids: Sequence[int]) -> ProcessState:
    if any(is_engine(pid) for pid in pids):
        return "alive"  # its labels may still be those of an earlier attempt
    if HOST not in run.labels:
        return "unknown"
    process, mine = process_of(run.labels), ProcessName.of_this()
    if process is None or (process.boot == mine.boot and process.space != mine.space):
        return "elsewhere"
    return "alive" if process.is_visible_to(mine) and not process.has_ended() else "gone"


def _heartbeat_age_s(client: SyncPrefectClient, run: FlowRun, now: datetime) -> float | None:
    """Seconds since the last heartbeat of a run that should send some; None: it never did."""
    state = run.state
    if state is None or state.type not in {StateType.RUNNING, StateType.CANCELLING}:
        return None
    wanted = EventFilter(
        occurred=EventOccurredFilter.model_validate({"since": now - timedelta(seconds=2 * DAY_S)}),
        event=EventNameFilter(name=[HEARTBEAT]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        order=EventOrder.DESC,
    )
    newest = client.read_events(wanted, limit=1).events
    return (now - newest[0].occurred).total_seconds() if newest else None


def _num_online(client: SyncPrefectClient, pool: str, now: datetime) -> int:
    return sum(is_online(worker, now) for worker in client.read_workers_for_work_pool(pool))


def _limits(client: SyncPrefectClient) -> Iterator[GlobalConcurrencyLimitResponse]:
    offset = 0
    while page := client.read_global_concurrency_limits(limit=PAGE, offset=offset):
        yield from page
        offset += len(page)


def utc_now() -> datetime:
    """This moment; runs are aged by it, so host and server must agree to a few seconds."""
    return datetime.now(UTC)
