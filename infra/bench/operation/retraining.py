"""From a stored drift result to a retraining run that started.

A real Prefect server with the automation `decide-on-drift`, a process worker that polls each
second, the decision and the loop as deployments. A retraining counts as started when its engine has
set it to Running; it is then cancelled.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any
from uuid import UUID

import yaml

from infra.bench.figures import Measured, at_most
from infra.bench.operation.prefect_api import prefect_api_server
from infra.bench.parts import Bench, wait_until
from infra.deploying.file import PREFECT_FILE
from infra.platform.api import PrefectApi
from tasks.contracts.base import TimeWindow
from tasks.contracts.drift import DriftResult
from tasks.contracts.evaluation import Metric
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.decision import Evidence
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import ClaimState
from tasks.kernel.settings import Settings

FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)
FREE = RetrainingPolicy(cool_down_hours=0, max_runs_per_week=1000)
LIMIT_S = 300
POOL = "coordinator"


def figures(bench: Bench) -> Measured:
    """Seconds from result to run."""
    num_results = bench.size(5, 1)
    with _platform(bench.folder) as ledger:
        created, running = zip(*[_one(ledger, n) for n in range(num_results)], strict=True)
    told = f"{num_results} results, from {min(running):.1f} to {max(running):.1f} s"
    return [
        at_most("drift result to retraining ordered, median s", median(created), 10, told),
        at_most("drift result to retraining running, median s", median(running), 10, told),
    ]


def _evidence() -> Evidence:
    """A check of one day whose labels are known, and which asks for a retraining."""
    return Evidence(
        result=DriftResult.RETRAIN,
        window=TimeWindow(start=FIRST_DAY, end=FIRST_DAY + timedelta(days=1)),
        version=1,
        num_features=10,
        num_drifted=3,
        drifted=("a", "b", "c"),
        prediction_drifted=True,
        prediction_effect_low=0.2,
        num_labelled=1000,
        auc_change=Metric(value=-0.1, low=-0.11, high=-0.09),
        excess_brier_change=Metric(value=0.03, low=0.02, high=0.04),
        champion_age_days=100.0,
        former_version=None,
        former_difference=None,
        sentences=("The bench says so.",),
    )


def _one(ledger: Ledger, number: int) -> tuple[float, float]:
    """Seconds until the retraining of one model existed, and until its engine ran."""
    model = f"bench-{number}"
    stored = datetime.now(UTC)
    _report(ledger, model)
    run_id = wait_until(lambda: _run_of(ledger, model), "a retraining", LIMIT_S)
    assert run_id
    from prefect import get_client
    from prefect.states import Cancelled

    with get_client(sync_client=True) as client:
        wait_until(lambda: client.read_flow_run(run_id).start_time, "its start", LIMIT_S)
        run: Any = client.read_flow_run(run_id)
        client.set_flow_run_state(run_id, Cancelled(), force=True)
    return (run.created - stored).total_seconds(), (run.start_time - stored).total_seconds()


def _report(ledger: Ledger, model: str) -> None:
    """Store a result and emit its event, as a drift check does."""
    from prefect.events import emit_event

    from tasks.control.retraining.task import JUDGED

    result = ledger.store_result(model, _use_case(), _evidence(), FREE)
    payload = {"verdict_id": result.result_id, "model": model, "use_case": _use_case()}
    emit_event(JUDGED, resource={"prefect.resource.id": f"falaj.model.{model}"}, payload=payload)


def _run_of(ledger: Ledger, model: str) -> UUID | None:
    started = [c.started for c in ledger.claims(ClaimState.STARTED, model) if c.started]
    return UUID(started[0].run_id) if started else None


def _use_case() -> str:
    from flows.config import read_pipeline_config

    return read_pipeline_config(Settings.from_environment({}).feature_repo).name


@contextmanager
def _platform(folder: Path) -> Iterator[Ledger]:
    """Server, deployments, automation, worker; yields the controller's database."""
    os.environ["FALAJ_HOME"] = str(folder / "home")
    with prefect_api_server(folder / "prefect") as api, api.in_process():
        _deploy(folder, Settings.from_environment().feature_repo)
        with api.worker(POOL, FALAJ_HOME=str(folder / "home"), PREFECT_WORKER_PREFETCH_SECONDS="0"):
            asked = PrefectApi(api.url, api.auth_string)
            wait_until(lambda: asked.workers(POOL), "a worker", LIMIT_S)
            yield Ledger(Settings.from_environment().metadata_url)


def _deploy(folder: Path, repo: Path) -> None:
    """The two deployments as they are, and the automations; nothing that a schedule starts."""
    from infra.deploying import deploy  # imports Prefect

    content = yaml.safe_load(PREFECT_FILE.read_text())
    wanted = [each for each in content["deployments"] if each["name"] in ("decision", "pipeline")]
    file = folder / "prefect.yaml"
    file.write_text(yaml.safe_dump({**content, "definitions": {}, "deployments": wanted}))
    deploy.run(deploy.make_plan([str(repo)], file=file))
