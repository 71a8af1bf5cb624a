"""Sweep: find runs that a kill or a stop left behind, put them right, and tell what was done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed
from pydantic import BaseModel, ConfigDict, Field

from flows.recovery_facts import STATES, SWEPT, run_facts, slot_facts, step_facts, utc_now
from flows.whereabouts import found_but_not_retried
from tasks.control.recovery.config import RecoveryConfig
from tasks.control.recovery.judge import (
    Action,
    Repair,
    RunFact,
    SlotFact,
    StepFact,
    dead_steps,
    judge,
    leaked_slots,
)
from tasks.control.recovery.processes import end_processes
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

    return tuple(str(claim) for claim in LeaseRepository(settings.operation_url).free_ended())


def find_repairs(client: SyncPrefectClient, config: RecoveryConfig) -> tuple[Repair, ...]:
    """What a sweep would do now; changes nothing."""
    return judge(run_facts(client, config, utc_now()), config)


def find_dead_steps(client: SyncPrefectClient, config: RecoveryConfig) -> tuple[StepFact, ...]:
    """Task runs that a sweep would end now; changes nothing."""
    return dead_steps(step_facts(client, utc_now()), config)


def _end_steps(client: SyncPrefectClient, config: RecoveryConfig) -> tuple[StepFact, ...]:
    steps = find_dead_steps(client, config)
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
    steps = _end_steps(client, config)
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
    if left := end_processes(repair.run, repair.pids, config.end_grace_s):
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
