"""Platforms with a controller for drills: what is on them is real, but no loop is ever run.

The loop's deployment is on a pool without a worker, so what the controller starts stays scheduled
and can be counted. All is counted by plain SQL in the two databases, not by the code that wrote
them.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config import read_pipeline_config
from infra.deploying.deploy import Plan, make_plan
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.decision import Evidence
from tasks.control.retraining.ledger import Ledger
from tests.support.control.builders import FREE, MODEL
from tests.support.host.processes import run_falaj
from tests.support.platform.accounts import rows_of
from tests.support.platform.deploys import REPO, part_of_the_file, redeploy, send
from tests.support.services.prefect_platform import PrefectApi, prefect_api_server

USE_CASE = read_pipeline_config(Path(REPO)).name
JUDGED = "falaj.drift.judged"
EACH_MINUTE = "* * * * *"


@dataclass
class ControlledPlatform:
    """A server, what is deployed on it, and the controller's database.

    Attributes:
        folder: of its state; the same folder again is the same platform again.
        url: address of the controller's database.
        api: the server, while it runs.
    """

    folder: Path
    url: str
    api: PrefectApi

    @property
    def environment(self) -> dict[str, str]:
        """What its flows have in their environment beside the address of the server."""
        named = {"FALAJ_HOME": str(self.folder / "home"), "FALAJ_FEATURE_REPO": REPO}
        return {**named, "FALAJ_DATABASE_URL": self.url}

    @property
    def plan(self) -> Plan:
        """Decision, sweep and loop; the sweep each minute, the loop where no worker is."""
        content = yaml.safe_load(part_of_the_file("decision", "retraining_sweep", "pipeline"))
        for entry in content["deployments"]:
            if entry["entrypoint"].startswith("flows.pipeline."):
                entry["work_pool"] = {"name": "gpu", "work_queue_name": "retrain"}
            for schedule in entry.get("schedules", ()):
                schedule["cron"] = EACH_MINUTE
        file = self.folder / "prefect.yaml"
        file.write_text(yaml.safe_dump(content))
        # A plan says which state its flows are to find: theirs, not that of this process.
        with pytest.MonkeyPatch.context() as environment:
            for name, value in self.environment.items():
                environment.setenv(name, value)
            return make_plan([REPO], file=file)

    def deploy_by_command(self) -> str:
        """Deploy once more, as a person does."""
        file = str(self.folder / "prefect.yaml")
        environment = self.api.command_environment(**self.environment)
        code, said = run_falaj("deploy", "--repo", REPO, "--file", file, **environment)
        assert code == 0, said
        return said

    def judge(self, seen: Evidence, policy: RetrainingPolicy = FREE) -> str:
        """Store a result, as a drift check does, and emit no event."""
        return Ledger(self.url).store_result(MODEL, USE_CASE, seen, policy).result_id

    def emit(self, results: Sequence[str]) -> None:
        """Emit the event of each."""
        payloads = [{"verdict_id": result, "model": MODEL} for result in results]
        send([(JUDGED, f"falaj.model.{MODEL}", payload) for payload in payloads])

    def retrainings(self) -> list[tuple[str, str]]:
        """Key and state of each run of the loop that the server has."""
        return self.prefect(
            "SELECT run.idempotency_key, run.state_type FROM flow_run AS run "
            "JOIN flow ON flow.id = run.flow_id WHERE flow.name = 'pipeline' ORDER BY run.created"
        )

    def num_events(self) -> int:
        """Drift results that the server knows of."""
        return self.prefect(f"SELECT count(*) FROM events WHERE event = '{JUDGED}'")[0][0]

    def num_sweeps(self) -> int:
        """Sweeps that were completed."""
        completed = self.prefect(
            "SELECT run.id FROM flow_run AS run JOIN flow ON flow.id = run.flow_id "
            "WHERE flow.name = 'retraining-sweep' AND run.state_type = 'COMPLETED'"
        )
        return len(completed)

    def prefect(self, query: str) -> list[Any]:
        """Rows of the server's database."""
        return rows_of(self.folder / "prefect" / "prefect.db", query)

    def operation(self, query: str) -> list[Any]:
        """Rows of the controller's database."""
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=60)) as file:
            rows = file.execute(query).fetchall()
            file.commit()
            return rows


@contextmanager
def controlled_platform(folder: Path) -> Iterator[ControlledPlatform]:
    """A platform with a worker, on a new or an earlier state folder; this process uses it."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    own = f"sqlite:///{folder / 'home' / 'operation' / 'operation.db'}"
    with ExitStack() as stack:
        api = stack.enter_context(prefect_api_server(folder / "prefect"))
        platform = ControlledPlatform(folder, own, api)
        Ledger(platform.url)
        with api.in_process():
            redeploy(platform.plan)
        stack.enter_context(api.worker("coordinator", **platform.environment))
        stack.enter_context(api.in_process())
        yield platform


def acting(platform: ControlledPlatform) -> list[str]:
    """Incidents whose one run was claimed."""
    found = platform.operation("SELECT episode_id FROM falaj_claims ORDER BY claimed_at")
    return [incident for (incident,) in found]


def num_unanswered(platform: ControlledPlatform) -> int:
    """Results that nobody has answered."""
    return platform.operation("SELECT count(*) FROM falaj_verdicts WHERE answered_at IS NULL")[0][0]


def outcomes(platform: ControlledPlatform) -> list[str]:
    """What the decisions came to, in their order."""
    found = platform.operation("SELECT outcome FROM falaj_decisions ORDER BY number")
    return [outcome for (outcome,) in found]
