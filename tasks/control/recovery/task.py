"""Sweep: find runs that a kill or a stop left behind, put them right, and report what was done."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast
from uuid import UUID

import psutil
from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.filters import EventFilter, EventOrder
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed
from pydantic import Field

from tasks.control.config import RecoveryConfig
from tasks.control.recovery import judge as judging
from tasks.control.routing.task import PAGE, num_online, paged, server_now
from tasks.kernel.files import machine_id
from tasks.kernel.process import ProcessName, boot_id, processes_by_variable, variable_of
from tasks.kernel.retry_policy import KEPT
from tasks.kernel.settings import Settings
from tasks.kernel.values import Contract

RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Set by a worker in the environment of a run's engine, and inherited by all that it starts."""
ENGINE = "prefect.engine"
POLL_S = 0.1
END_GRACE_S = 5.0  # between SIGTERM and SIGKILL

HOST, MACHINE = "falaj.host", "falaj.machine"
BOOT, SPACE = "falaj.boot", "falaj.space"
PID, STARTED = "falaj.pid", "falaj.started"
BEATS = "falaj.heartbeat_s"
"""Seconds between the heartbeats of a run that sends some."""
NOT_RETRIED = "falaj.not_retried"
"""Why a run is not started again by itself when it was cut off."""

UNFINISHED = [StateType.RUNNING, StateType.CANCELLING, StateType.PENDING]
"""States in which a run holds a slot of its deployment's limit."""
HEARTBEAT = "prefect.flow-run.heartbeat"
STATES: dict[str, Callable[..., State[Any]]] = {
    "crash": Crashed,
    "cancel": Cancelled,
    "ask to cancel": Cancelling,
    "retry": AwaitingRetry,
}


class Sweep(Contract):
    """What a sweep saw and did."""

    done: tuple[judging.Repair, ...] = ()
    slots: tuple[judging.SlotFact, ...] = ()
    task_runs: tuple[judging.TaskRunFact, ...] = Field(
        default=(), description="Task runs of attempts that are over, ended."
    )
    left: tuple[tuple[str, str, str], ...] = Field(
        default=(), description="Name, flow, and why a person is to look: no repair helps."
    )

    def rows(self) -> list[dict[str, str]]:
        """All that was done, and what only a person can do, for people."""
        rows = [(done.name, done.flow, done.outcome, done.why) for done in self.done]
        for slot in self.slots:
            why = f"{slot.taken} were taken and {slot.num_holders} runs held one"
            rows.append((slot.limit, "", f"{slot.taken - slot.num_holders} slots freed", why))
        for each in self.task_runs:
            rows.append((each.run, "", f"task run {each.name} ended", "its attempt is over"))
        rows += [(name, flow, "left to a person", why) for name, flow, why in self.left]
        return [dict(zip(("run", "flow", "outcome", "why"), row, strict=True)) for row in rows]


@task(name="sweep-stale-runs", **KEPT, cache_policy=NO_CACHE)
def sweep_stale_runs(config: RecoveryConfig) -> Sweep:
    """Look, judge and repair.

    Safe to retry: each run is read again right before it is changed, and a run that has moved on is
    left alone.
    """
    with get_client(sync_client=True) as client:
        sweep = sweep_once(client, config)
    rows = sweep.rows()
    for row in rows:
        get_run_logger().warning("%s: %s (%s)", row["run"], row["outcome"], row["why"])
    if rows:
        create_table_artifact(key="recovery", table=rows, description="Repairs of one sweep")
    return sweep


def find_repairs(client: SyncPrefectClient, config: RecoveryConfig) -> tuple[judging.Repair, ...]:
    """What a sweep would do now; changes nothing."""
    return judging.judge(_run_facts(client, config), config)


def find_dead_task_runs(client: SyncPrefectClient) -> tuple[judging.TaskRunFact, ...]:
    """Task runs that a sweep would end now; changes nothing."""
    now, wanted = server_now(client), TaskRunFilter.model_validate(_in_state(UNFINISHED))
    found = list(paged(client.read_task_runs, task_run_filter=wanted))
    owners = {each.flow_run_id for each in found if each.flow_run_id}
    runs: dict[UUID | None, FlowRun] = {run.id: run for run in _by_id(client, list(owners))}
    living = {
        run.parent_task_run_id
        for run in _by_id(client, [each.id for each in found], field="parent_task_run_id")
        if run.state is not None and not run.state.is_final()
    }
    facts = [
        judging.TaskRunFact(
            id=str(each.id),
            name=each.name,
            age_s=(now - each.state.timestamp).total_seconds(),
            attempt=each.flow_run_run_count,
            run=run.name,
            run_state=_state_of(run),
            run_age_s=_age_s(run, now),
            run_attempts=run.run_count,
            stands_for_run=each.id in living,
        )
        for each in found
        if (run := runs.get(each.flow_run_id)) and run.state is not None and each.state is not None
    ]
    return judging.dead_task_runs(facts)


def sweep_once(client: SyncPrefectClient, config: RecoveryConfig) -> Sweep:
    """Repair what is certain at once, and the rest where a second look confirms it."""
    facts, slots = _run_facts(client, config), slot_facts(client)
    repairs = judging.judge(facts, config)
    done = list(_repaired(client, repairs, facts))
    suspects = {repair.run for repair in repairs if not repair.certain}
    if suspects or any(slot.taken > slot.num_holders for slot in slots):
        time.sleep(config.second_look_s)
        again = _run_facts(client, config)
        confirmed = [
            replace(r, certain=True)
            for r in judging.judge(again, config)
            if r.certain or r.run in suspects
        ]
        done += _repaired(client, confirmed, again)
    leaks = judging.leaked_slots(slots, slot_facts(client))
    for leak in leaks:
        freed = GlobalConcurrencyLimitUpdate(active_slots=leak.num_holders)
        client.update_global_concurrency_limit(leak.limit, freed)
    if any(each.action == "crash" for each in done):
        later = _run_facts(client, config)
        done += _repaired(
            client, [r for r in judging.judge(later, config) if r.action == "retry"], later
        )
    ended = _end_task_runs(client)
    rest = [fact for fact in facts if fact.id not in {each.run for each in done}]
    left = tuple(_left_to_a_person(client, config, rest))
    return Sweep(done=tuple(done), slots=leaks, task_runs=ended, left=left)


def _left_to_a_person(
    client: SyncPrefectClient, config: RecoveryConfig, facts: Sequence[judging.RunFact]
) -> Iterator[tuple[str, str, str]]:
    pools = {fact.pool for fact in facts if fact.pool and fact.state == "scheduled"}
    without_worker = {pool for pool in pools if not num_online(client, pool)}
    for fact in facts:
        if why := judging.needs_a_person(fact, config, without_worker):
            yield fact.name, fact.flow, why


def _end_task_runs(client: SyncPrefectClient) -> tuple[judging.TaskRunFact, ...]:
    dead = find_dead_task_runs(client)
    for each in dead:
        message = f"{judging.SWEPT}attempt {each.attempt} of {each.run} is over."
        state = Cancelled if each.run_state == "cancelled" else Crashed
        client.set_task_run_state(UUID(each.id), state(message=message), force=True)
    return dead


def _repaired(
    client: SyncPrefectClient, repairs: Iterable[judging.Repair], facts: Sequence[judging.RunFact]
) -> Iterator[judging.Repair]:
    seen = {fact.id: fact for fact in facts}
    for repair in repairs:
        if repair.certain:
            try:
                outcome = _carried_out(client, repair, seen[repair.run])
            except ObjectNotFound:
                outcome = "was deleted meanwhile"
            yield replace(repair, outcome=outcome)


def _carried_out(client: SyncPrefectClient, repair: judging.Repair, fact: judging.RunFact) -> str:
    """Do one repair, unless the run has moved on since it was seen; returns what came of it."""
    run = client.read_flow_run(UUID(repair.run))
    if run.state is None or _state_of(run) != fact.state or run.run_count != fact.attempts:
        return "moved on by itself"
    if left := end_processes(repair.run, repair.pids):
        return f"could not be ended: processes {', '.join(map(str, left))}"
    if repair.action not in STATES:
        return "processes ended"
    state = STATES[repair.action](message=f"{judging.SWEPT}{repair.why}.")
    set_to = client.set_flow_run_state(run.id, state).state
    return f"is {set_to.name if set_to else state.name}"


def _run_facts(client: SyncPrefectClient, config: RecoveryConfig) -> tuple[judging.RunFact, ...]:
    """All runs about which something may have to be done, and those that called them."""
    now, local = server_now(client), processes_by_variable(RUN_VARIABLE)
    runs = {run.id: run for run in _candidates(client, config, local, now)}
    parents = _parents(client, list(runs.values()))
    missing = [UUID(p) for p in parents.values() if UUID(p) not in runs]
    runs |= {run.id: run for run in _by_id(client, missing)}
    kinds = {pool.name: pool.type for pool in client.read_work_pools(limit=PAGE)}
    flows = {flow: client.read_flow(flow).name for flow in {r.flow_id for r in runs.values()}}

    def fact(run: FlowRun) -> judging.RunFact:
        pids = tuple(local.get(str(run.id), ()))
        process = _process(run, pids)
        is_seen = process in {"alive", "gone"}
        return judging.RunFact(
            id=str(run.id),
            name=run.name,
            flow=flows[run.flow_id],
            state=_state_of(run),
            age_s=_age_s(run, now),
            process=process,
            pids=pids,
            heartbeat_age_s=None if is_seen else _heartbeat_age_s(client, run, now),
            beats_s=float(run.labels.get(BEATS) or 0),
            attempts=run.run_count,
            restarts=0 if run.run_count else _num_restarts(client, run),
            retried=not run.run_count or (HOST in run.labels and NOT_RETRIED not in run.labels),
            deployed=run.deployment_id is not None,
            parent=parents.get(run.id) or ("unknown" if run.parent_task_run_id else None),
            pool=run.work_pool_name,
            pool_type=kinds.get(run.work_pool_name or ""),
        )

    return tuple(fact(run) for run in runs.values() if run.state is not None)


def slot_facts(client: SyncPrefectClient) -> tuple[judging.SlotFact, ...]:
    """Taken slots of all deployments with a limit, and the runs that may hold them."""
    facts = []
    for limit in paged(client.read_global_concurrency_limits):
        kind, _, deployment = limit.name.partition(":")
        if kind != "deployment" or not limit.active_slots:
            continue
        held = client.count_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate(_in_state(UNFINISHED)),
            deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment]}}),
        )
        facts.append(
            judging.SlotFact(limit=limit.name, taken=int(limit.active_slots), num_holders=held)
        )
    return tuple(facts)


def _candidates(
    client: SyncPrefectClient,
    config: RecoveryConfig,
    local: Mapping[str, Sequence[int]],
    now: datetime,
) -> Iterator[FlowRun]:
    due = now - timedelta(seconds=judging.PARENT_GRACE_S)
    cut_off = now - timedelta(seconds=config.retry_within_s)
    wanted: list[dict[str, Any]] = [
        _in_state(UNFINISHED),
        _in_state([StateType.SCHEDULED]) | {"expected_start_time": {"before_": due}},
        _in_state([StateType.CRASHED]) | {"end_time": {"after_": cut_off}},
    ]
    for each in wanted:
        yield from paged(client.read_flow_runs, flow_run_filter=FlowRunFilter.model_validate(each))
    yield from _by_id(client, [UUID(run) for run in local])


def _in_state(types: Sequence[StateType]) -> dict[str, Any]:
    return {"state": {"type": {"any_": list(types)}}}


def _by_id(client: SyncPrefectClient, ids: Sequence[UUID], field: str = "id") -> Iterator[FlowRun]:
    """Flow runs of which a field holds one of some ids."""
    for start in range(0, len(ids), PAGE):
        wanted = FlowRunFilter.model_validate({field: {"any_": ids[start : start + PAGE]}})
        yield from paged(client.read_flow_runs, flow_run_filter=wanted)


def _num_restarts(client: SyncPrefectClient, run: FlowRun) -> int:
    """How often a sweep has started a run again that never began: the server does not count it."""
    if run.state is None or not run.state.is_crashed():
        return 0
    states = client.read_flow_run_states(run.id)
    return sum(
        s.name == "AwaitingRetry" and (s.message or "").startswith(judging.SWEPT) for s in states
    )


def _parents(client: SyncPrefectClient, runs: Iterable[FlowRun]) -> dict[UUID, str]:
    """Run to the run that called it; runs of which the server does not know it yet are absent."""
    called_by = {run.parent_task_run_id: run.id for run in runs if run.parent_task_run_id}
    ids, found = list(called_by), {}
    for start in range(0, len(ids), PAGE):
        wanted = TaskRunFilter.model_validate({"id": {"any_": ids[start : start + PAGE]}})
        for task_run in client.read_task_runs(task_run_filter=wanted, limit=PAGE):
            if task_run.flow_run_id:
                found[called_by[task_run.id]] = str(task_run.flow_run_id)
    return found


def _state_of(run: FlowRun) -> judging.RunState:
    assert run.state is not None
    return cast(judging.RunState, run.state.type.value.lower())


def _age_s(run: FlowRun, now: datetime) -> float:
    """Seconds since the run came into its state; of a scheduled one, since it was due."""
    assert run.state is not None
    since = run.state.timestamp
    if run.state.type == StateType.SCHEDULED:
        since = run.next_scheduled_start_time or run.expected_start_time or since
    return (now - since).total_seconds()


def _process(run: FlowRun, pids: Sequence[int]) -> judging.ProcessState:
    if any(is_engine(pid) for pid in pids):
        return "alive"  # its labels may still be those of an earlier attempt
    if HOST not in run.labels:
        return "unknown"
    process, mine = process_of(run.labels), ProcessName.of_this()
    if process is None or (process.boot == mine.boot and process.space != mine.space):
        return "elsewhere"
    return "alive" if process.is_visible_to(mine) and not process.has_ended() else "gone"


def _heartbeat_age_s(client: SyncPrefectClient, run: FlowRun, now: datetime) -> float | None:
    """Seconds since the last heartbeat of a run that should send some; None: none has arrived."""
    if _state_of(run) not in {"running", "cancelling"}:
        return None
    wanted = EventFilter.model_validate(
        {
            "occurred": {"since": now - timedelta(seconds=2 * judging.DAY_S)},
            "event": {"name": [HEARTBEAT]},
            "resource": {"id": [f"prefect.flow-run.{run.id}"]},
            "order": EventOrder.DESC,
        }
    )
    newest = client.read_events(wanted, limit=1).events
    return (now - newest[0].received).total_seconds() if newest else None


def _machine() -> str:
    return machine_id(Settings.from_environment().home)


def own_labels() -> dict[str, bool | int | float | str]:
    """This process, as labels of a run."""
    mine = ProcessName.of_this()
    return {
        HOST: socket.gethostname(),
        MACHINE: _machine(),
        BOOT: mine.boot,
        SPACE: mine.space,
        PID: mine.pid,
        STARTED: mine.start,
        BEATS: PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value() or 0,
    }


def process_of(labels: Mapping[str, Any]) -> ProcessName | None:
    """The process that labels name; None where it is another machine's, or there are none."""
    if labels.get(HOST) != socket.gethostname():
        return None
    if labels[BOOT] != boot_id() and labels.get(MACHINE, _machine()) != _machine():
        return None  # host names are not unique; earlier versions noted nothing else
    space = labels.get(SPACE) or ProcessName.of_this().space  # earlier versions noted none
    return ProcessName(
        boot=str(labels[BOOT]), space=str(space), pid=int(labels[PID]), start=int(labels[STARTED])
    )


def is_engine(pid: int) -> bool:
    """True for the process that runs a flow run itself, not for what it has forked or started.

    A worker starts it as the leader of a process group of its own.
    """
    try:
        return ENGINE in psutil.Process(pid).cmdline() and os.getpgid(pid) == pid
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def end_processes(run: str, pids: Iterable[int], grace_s: float = END_GRACE_S) -> tuple[int, ...]:
    """End the processes of a run: SIGTERM, and SIGKILL for those that are left after the grace.

    A process is signalled only while its environment names the run, so that a reused id is spared.

    Returns:
        Those that were still there in the end.
    """

    def remaining(pids: Iterable[int]) -> set[int]:
        return {pid for pid in pids if variable_of(pid, RUN_VARIABLE) == run}

    left = remaining(pids)
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + limit_s
        while (left := remaining(left)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return tuple(sorted(left))
