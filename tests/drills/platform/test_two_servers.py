"""Two Prefect servers and two controllers on one PostgreSQL and one Redis: each is killed in turn.

Clients ask a balancer before both servers, as `api_url` of the platform's configuration says.
"""

import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prefect import get_client

from infra.bench.operation.prefect_api import PrefectApi
from infra.bench.parts import wait_until
from infra.platform.api import answers as answers_http
from infra.platform.config import DATABASE_URL, REDIS_URL, PlatformConfig
from infra.platform.files import PlatformFiles
from infra.platform.services import Plan, has_prefect_redis, prefect_service, worker_environment
from tasks.kernel.process import guarded_process
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.control import builders
from tests.support.control.platforms import ControlledPlatform
from tests.support.host.relay import balanced
from tests.support.platform.deployed import deploy
from tests.support.platform.deploys import REPO, redeploy
from tests.support.platform.hardware_flows import busy_flow
from tests.support.services.servers import (
    free_port,
    new_database,
    postgres_server,
    postgres_with_trigrams,
    redis_server,
)

PROGRAMS = postgres_with_trigrams()
pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PROGRAMS is None, reason="no PostgreSQL with pg_trgm is installed here"),
    pytest.mark.skipif(not has_prefect_redis(), reason="prefect-redis is not installed"),
]
PASSWORD = "admin:of-the-drill"
AWAY_S = 20.0
LIMIT_S = 900.0


@dataclass
class Host:
    """One host's server, watch and worker; each can be killed and started again."""

    plan: Plan
    more: dict[str, str]
    stack: ExitStack
    running: dict[str, Any] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        clients = worker_environment(self.plan) | self.more
        server = prefect_service(self.plan)
        worker = ["worker", "start", "--type", "process", "--pool", "coordinator"]
        name = self.plan.files.worker_name("coordinator")
        lines = {
            "server": (list(server.command), server.environment),
            "watch": ([sys.executable, "-m", "flows.recovery"], clients),
            "worker": ([sys.executable, "-m", "prefect", *worker, "--name", name], clients),
        }
        for each in names:
            command, environment = lines[each]
            log = self.plan.files.home / f"{each}.log"
            guarded = guarded_process(command, log, dict(environment), folder=PROJECT_ROOT)
            self.running[each] = self.stack.enter_context(guarded)

    def kill(self, *names: str) -> None:
        for each in names:
            self.running[each].kill()
            self.running[each].wait(60)

    def until_ready(self) -> None:
        url = f"{self.plan.endpoint.api_url}/health"
        wait_until(lambda: answers_http(url, PASSWORD), "the server answers", LIMIT_S)


def make_host(folder: Path, api_url: str, stores: dict[str, str], port: int, **more: Any) -> Host:
    folder.mkdir()
    ports = {"prefect": port, "mlflow": 0, "serving": 0, "serving_grpc": 0}
    config = PlatformConfig(profile="server", port=port, api_url=api_url)
    files = PlatformFiles(folder)
    plan = Plan(files, config, ports, PASSWORD, {**os.environ, **stores}, ("cpu",), "drill")
    return Host(plan, **more)


def rows(uri: str, query: str) -> list[Any]:
    with psycopg.connect(uri) as connection:
        return connection.execute(query).fetchall()


def test_either_server_and_either_controller_may_be_killed_and_nothing_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        uri = stack.enter_context(postgres_server(tmp_path, PROGRAMS))
        operation = new_database(uri)
        redis = stack.enter_context(redis_server(tmp_path))
        stores = {DATABASE_URL: uri, REDIS_URL: f"redis://127.0.0.1:{redis.port}/0"}
        ports = [free_port(), free_port()]
        servers = [("127.0.0.1", port) for port in ports]
        api_url = f"http://127.0.0.1:{stack.enter_context(balanced('127.0.0.1', *servers))}/api"
        named = {"FALAJ_HOME": str(tmp_path / "home"), "FALAJ_DATABASE_URL": operation}
        named |= {"FALAJ_FEATURE_REPO": REPO, "PYTHONPATH": str(PROJECT_ROOT)}
        hosts = [
            make_host(tmp_path / name, api_url, stores, port, more=named, stack=stack)
            for name, port in zip("ab", ports, strict=True)
        ]
        for host in hosts:
            host.start("server")
            host.until_ready()
        settings = {
            name: value
            for name, value in worker_environment(hosts[0].plan).items()
            if name.startswith("PREFECT_")
        }
        api = PrefectApi(tmp_path, api_url, PASSWORD, settings)
        stack.enter_context(api.in_process())
        platform = ControlledPlatform(tmp_path, operation, api)
        redeploy(platform.plan)
        client = stack.enter_context(get_client(sync_client=True))
        busy = deploy(client, busy_flow, "busy", "coordinator")
        for host in hosts:
            host.start("watch", "worker")

        journal, started, number, incidents = tmp_path / "journal", list[Any](), 0, 0

        def states() -> list[str]:
            found = [client.read_flow_run(run).state for run in started]
            return [state.type.value if state else "" for state in found]

        for killed in (("server",), ("server", "worker"), ("server", "watch")):
            for host in hosts:
                # One incident a round: labels of the next week show that the model holds.
                incidents += 1
                platform.emit([platform.judge(builders.stale(2 * incidents))])
                for _ in range(2):
                    given = {"number": number, "seconds": 15, "journal": str(journal)}
                    run = client.create_flow_run_from_deployment(busy, parameters=given)
                    started.append(run.id)
                    number += 1
                wait_until(lambda: not {"SCHEDULED", "PENDING"} & {*states()}, "begun", LIMIT_S)
                host.kill(*killed)
                threading.Event().wait(AWAY_S)
                platform.emit([platform.judge(builders.stable(2 * incidents + 1))])
                host.start(*killed)
                host.until_ready()

        wait_until(lambda: set(states()) == {"COMPLETED"}, "all have ended", LIMIT_S)
        ends = [line for line in journal.read_text().splitlines() if "begins" not in line]
        assert sorted(map(int, ends)) == list(range(number))
        unanswered = "SELECT count(*) FROM falaj_verdicts WHERE answered_at IS NULL"
        wait_until(lambda: rows(operation, unanswered) == [(0,)], "all are answered", LIMIT_S)
        claims = rows(operation, "SELECT episode_id FROM falaj_claims ORDER BY 1")
        assert len(claims) == incidents
        of_flow = "FROM flow_run r JOIN flow f ON f.id = r.flow_id WHERE f.name = "
        keys = rows(uri, f"SELECT r.idempotency_key {of_flow} 'pipeline' ORDER BY 1")
        assert keys == claims
        sweeps = rows(
            uri,
            f"SELECT r.expected_start_time, count(*), max(r.state_type::text) {of_flow} "
            "'retraining-sweep' AND r.auto_scheduled AND r.expected_start_time < now() - "
            "interval '1 minute' GROUP BY 1 ORDER BY 1",
        )
        assert sweeps
        assert {n for _, n, _ in sweeps} == {1}
        assert {state for _, _, state in sweeps} <= {"COMPLETED", "CANCELLED"}
