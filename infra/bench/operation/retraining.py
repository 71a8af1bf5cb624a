"""From a stored drift result to a retraining run that started, and a storm of duplicates.

A real Prefect server with the automation `decide-on-drift`, a process worker that polls each
second, the decision and the loop as deployments. A retraining counts as started when its engine has
set it to Running; it is then cancelled.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from infra.bench.figures import Measured, at_most
from infra.bench.operation.prefect_api import PrefectApi, prefect_api_server
from infra.bench.parts import Bench
from tasks.contracts.base import TimeWindow
from tasks.contracts.drift import DriftResult
from tasks.contracts.evaluation import Metric
from tasks.control.retraining.acting import start_claimed
from tasks.control.retraining.config import RetrainingPolicy
from tasks.control.retraining.evidence import Evidence
from tasks.control.retraining.incidents import Here, answer
from tasks.control.retraining.ledger import Ledger, Wanted
from tasks.control.retraining.records import ClaimState, Order, Outcome, RunEnd, StartedAction
from tasks.kernel.settings import Settings

FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)
FREE = RetrainingPolicy(cool_down_hours=0, max_runs_per_week=1000)
NUM_RESULTS = 5
NUM_DUPLICATES = 10_000
NUM_THREADS = 8
LIMIT_S = 300
POOL = "coordinator"
FLOWS = {
    "decision": "flows.decision.decision_flow",
    "pipeline": "flows.pipeline.pipeline_flow",
}


def figures(bench: Bench) -> Measured:
    """Seconds from result to run, and runs of ten thousand duplicates."""
    storm = _storm(bench.folder, bench.size(NUM_DUPLICATES, 100))
    return [*_reaction(bench.folder, bench.size(NUM_RESULTS, 1)), *storm]


def _reaction(folder: Path, num_results: int) -> Measured:
    with _platform(folder) as ledger:
        created, running = zip(*[_one(ledger, n) for n in range(num_results)], strict=True)
    told = f"{num_results} results, from {min(running):.1f} to {max(running):.1f} s"
    return [
        at_most("drift result to retraining ordered, median s", _median(created), 10, told),
        at_most("drift result to retraining running, median s", _median(running), 10, told),
    ]


def _evidence(result: DriftResult, day: int, auc_lost: float) -> Evidence:
    """A check of one day whose labels are known."""
    lost = Metric(value=-auc_lost, low=-auc_lost - 0.01, high=-auc_lost + 0.01)
    start = FIRST_DAY + timedelta(days=day)
    return Evidence(
        result=result,
        window=TimeWindow(start=start, end=start + timedelta(days=1)),
        version=1,
        num_features=10,
        num_drifted=3,
        drifted=("a", "b", "c"),
        prediction_drifted=True,
        prediction_effect_low=0.2,
        num_labelled=1000,
        auc_change=lost,
        excess_brier_change=Metric(value=0.03, low=0.02, high=0.04),
        champion_age_days=100.0,
        former_version=None,
        former_difference=None,
        sentences=("The bench says so.",),
    )


def _median(seconds: tuple[float, ...]) -> float:
    return statistics.median(seconds)


def _one(ledger: Ledger, number: int) -> tuple[float, float]:
    """Seconds until the retraining of one model existed, and until its engine ran."""
    model = f"bench-{number}"
    stored = datetime.now(UTC)
    _tell(ledger, model)
    run_id = _poll(lambda: _run_of(ledger, model))
    with _client() as client:
        run = _poll(lambda: _started(client.read_flow_run(run_id)))
        _cancel(client, run_id)
    seconds = [(moment - stored).total_seconds() for moment in (run.created, run.start_time)]
    return seconds[0], seconds[1]


def _tell(ledger: Ledger, model: str) -> str:
    """Store a result and emit its event, as a drift check does."""
    from prefect.events import emit_event

    from tasks.control.retraining.task import JUDGED

    seen = _evidence(DriftResult.RETRAIN, 0, auc_lost=0.1)
    result = ledger.store_result(model, _use_case(), seen, FREE)
    payload = {"verdict_id": result.result_id, "model": model, "use_case": _use_case()}
    emit_event(JUDGED, resource={"prefect.resource.id": f"falaj.model.{model}"}, payload=payload)
    return result.result_id


def _run_of(ledger: Ledger, model: str) -> UUID | None:
    started = [c.started for c in ledger.claims(ClaimState.STARTED, model) if c.started]
    return UUID(started[0].run_id) if started else None


def _started(run: Any) -> Any:
    return run if run.start_time is not None else None


def _cancel(client: Any, run_id: UUID) -> None:
    from prefect.states import Cancelled

    client.set_flow_run_state(run_id, Cancelled(), force=True)


def _poll(ask: Any) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if (found := ask()) is not None:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"nothing within {LIMIT_S} s")


def _client() -> Any:
    from prefect import get_client

    return get_client(sync_client=True)


def _use_case() -> str:
    from flows.config import read_pipeline_config

    return read_pipeline_config(Settings.from_environment({}).feature_repo).name


@contextmanager
def _platform(folder: Path) -> Iterator[Ledger]:
    """Server, deployments, automation, worker; yields the controller's database."""
    os.environ["FALAJ_HOME"] = str(folder / "home")
    with prefect_api_server(folder / "prefect") as api, api.in_process():
        asyncio.run(_deploy())
        with api.worker(POOL, FALAJ_HOME=str(folder / "home"), PREFECT_WORKER_PREFETCH_SECONDS="0"):
            _wait_for_worker(api)
            yield Ledger(Settings.from_environment().metadata_url)


def _wait_for_worker(api: PrefectApi) -> None:
    def online() -> bool | None:
        return bool(asyncio.run(_workers())) or None

    _poll(online)


async def _workers() -> list[Any]:
    from prefect import get_client

    async with get_client() as client:
        return list(await client.read_workers_for_work_pool(POOL))


async def _deploy() -> None:
    from prefect import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    from flows.config import read_pipeline_config
    from flows.decision import decision_flow
    from flows.pipeline import pipeline_flow
    from infra.deploying.automations import decide_on_drift

    config = read_pipeline_config(Settings.from_environment({}).feature_repo)
    parameters = {"decision": {}, "pipeline": {"config": config.model_dump(mode="json")}}
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        for deployed in (decision_flow, pipeline_flow):
            await client.create_deployment(
                await client.create_flow(deployed),
                POOL,
                work_pool_name=POOL,
                entrypoint=FLOWS[deployed.name],
                pull_steps=[],
                parameters=parameters[deployed.name],
            )
        await decide_on_drift().write(client)


class _Keys:
    """A platform that keeps one run for each key."""

    def __init__(self) -> None:
        self.runs: set[str] = set()

    def start(self, order: Order) -> StartedAction:
        self.runs.add(order.episode_id)
        return StartedAction(kind="deployment", run_id=order.episode_id, place="a set")

    def end(self, order: Order, started: StartedAction) -> RunEnd | None:
        return None


def _storm(folder: Path, num_duplicates: int) -> Measured:
    """Ask many times for the answer to one result, then to that of a second episode."""
    ledger, keys = Ledger(f"sqlite:///{folder / 'storm' / 'operation.db'}"), _Keys()

    def ask(result_id: str) -> None:
        start_claimed(ledger, answer(ledger, result_id, "bench", Here(None)).orders, keys)

    def store(number: int, *, is_bad: bool) -> str:
        result = DriftResult.RETRAIN if is_bad else DriftResult.STABLE
        seen = _evidence(result, 7 * number, auc_lost=0.1 if is_bad else 0.0)
        return ledger.store_result("storm", "storm", seen, FREE).result_id

    began = time.monotonic()
    first = store(0, is_bad=True)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(ask, [first] * num_duplicates))
    seconds, once = time.monotonic() - began, len(keys.runs)
    for number, is_bad in ((1, False), (2, True)):
        ask(store(number, is_bad=is_bad))
    acts = ledger.decisions(Wanted(outcome=Outcome.ACTS))
    told = f"{seconds:.0f} s on SQLite, {NUM_THREADS} threads; {len(acts)} decisions to act"
    return [
        at_most(f"runs of {num_duplicates:,} duplicate events", once, 1, told),
        at_most(
            "runs of two distinct episodes, difference from two", abs(len(keys.runs) - 2), 0, told
        ),
    ]
