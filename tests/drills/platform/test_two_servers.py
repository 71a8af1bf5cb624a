"""Two Prefect servers and two controllers on one PostgreSQL and one Redis: each is killed in turn.

Clients ask a balancer before both servers, as `api_url` of the platform's configuration says. Then
two hosts with a whole `falaj up` each, on S3 too, one of which loses its power in a loop: its
network is gone first, so no connection is closed and nobody hears of it.
"""

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prefect import get_client

from infra.bench.operation.prefect_api import PrefectApi
from infra.bench.operation.state import BUCKET, state_variables
from infra.bench.parts import wait_until
from infra.platform.api import answers as answers_http
from infra.platform.config import DATABASE_URL, REDIS_URL, PlatformConfig
from infra.platform.files import Endpoint, PlatformFiles
from infra.platform.services import Plan, has_prefect_redis, prefect_service, worker_environment
from tasks.kernel.files import private_folder
from tasks.kernel.process import guarded_process
from tasks.kernel.settings import PROJECT_ROOT
from tasks.metadata.database import held_everywhere
from tests.support.control import builders
from tests.support.control.platforms import ControlledPlatform
from tests.support.host.machines import DISK, HOST, Machine, machines, variables
from tests.support.host.relay import balanced
from tests.support.platform.accounts import STAGES
from tests.support.platform.deployed import deploy
from tests.support.platform.deploys import REPO, redeploy
from tests.support.platform.hardware_flows import busy_flow
from tests.support.platform.site import builds_of, locks_held
from tests.support.platform.whole_platform import WholePlatform, platform_repository
from tests.support.services.servers import (
    admit,
    free_port,
    new_database,
    postgres_server,
    postgres_with_trigrams,
    redis_server,
    s3_server,
)
from tests.support.state import make_bucket

PROGRAMS = postgres_with_trigrams()
pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PROGRAMS is None, reason="no PostgreSQL with pg_trgm is installed here"),
    pytest.mark.skipif(not has_prefect_redis(), reason="prefect-redis is not installed"),
]
PASSWORD = "admin:of-the-drill"
AWAY_S = 20.0
LIMIT_S, PORT = 1200.0, 4200
HOLDING = """
import pathlib, time
from tasks.metadata.database import held_everywhere
with held_everywhere(pathlib.Path("/mnt/home/some.lock")):
    print("it is held", flush=True)
    time.sleep(3600)
"""


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
        settings["PREFECT_LOCAL_STORAGE_PATH"] = str(tmp_path / "results")
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


def test_the_lock_of_a_machine_without_power_is_free_after_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, log = f"listen_addresses=127.0.0.1,{HOST}", tmp_path / "lone.log"
    # Without a second one the host's own end would have no carrier, and Linux counts no probe.
    with machines("lone", "other") as (lone, _), postgres_server(tmp_path, None, reached) as near:
        admit(near, f"{HOST}/24")
        told = variables(FALAJ_DATABASE_URL=near.replace("127.0.0.1", HOST))
        lone.start([sys.executable, "-c", HOLDING], told, log)
        wait_until(lambda: "it is held" in log.read_text(), "it is held", 120)
        lone.lose_power()
        assert locks_held(near) == 1, "the server knows nothing of it yet"
        monkeypatch.setenv("FALAJ_DATABASE_URL", near)
        monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
        with held_everywhere(tmp_path / "some.lock", wait_s=60):
            assert locks_held(near) == 1


@dataclass(kw_only=True)
class Pair(WholePlatform):
    """Two machines with a whole `falaj up` each as one platform; `home` is the first one's."""

    machines: dict[str, Machine]
    told: dict[str, str]
    api_url: str
    tunnels: list[list[str]]

    @property
    def endpoint(self) -> Endpoint:
        return super().endpoint.model_copy(update={"api_url": self.api_url})

    def bring_up(self, machine: Machine) -> None:
        """`falaj up`, to its end; all servers are reached through tunnels, as without TLS."""
        machine.connect()
        log = self.repository.path.with_name(f"{machine.name}.log")
        for words in (*self.tunnels, ["falaj", "up", "--config", str(DISK / "platform.yaml")]):
            machine.start([sys.executable, "-u", "-m", *words], self.told, log)
        assert machine.started[-1].wait(LIMIT_S) == 0, log.read_text()

    def host_of(self, run: str) -> Machine:
        """Where a run goes on, by its id or a pattern of its key; waits for it."""
        query = "SELECT labels ->> 'falaj.host' FROM flow_run WHERE state_type = 'RUNNING' AND "
        query += f"(id::text = '{run}' OR idempotency_key LIKE '{run}') AND labels::text ~ 'host'"
        found = wait_until(lambda: rows(self.told[DATABASE_URL], query), "it runs", LIMIT_S)
        return self.machines[found[0][0]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        made = stack.enter_context(machines("left", "right"))
        s3 = stack.enter_context(s3_server())
        make_bucket(s3, BUCKET)
        uri = stack.enter_context(postgres_server(folder, PROGRAMS))
        redis = stack.enter_context(redis_server(folder)).connection_string
        stores = {DATABASE_URL: uri, REDIS_URL: f"redis://{redis}/0"}
        told = variables(**state_variables(s3, new_database(uri), redis), **stores)
        tunnels = []
        for port in re.findall(r"127\.0\.0\.1:(\d+)", f"{s3} {uri} {redis}"):
            relay = stack.enter_context(balanced(HOST, ("127.0.0.1", int(port))))
            tunnels.append(["tests.support.host.relay", port, HOST, str(relay)])
        servers = [(f"10.91.77.{number}", PORT) for number in (2, 3)]
        api_url = f"http://{HOST}:{stack.enter_context(balanced(HOST, *servers))}/api"
        named = {machine.name: machine for machine in made}
        repository = platform_repository(folder)
        of_first = made[0].disk / "home"
        more: dict[str, Any] = {"told": told, "api_url": api_url, "tunnels": tunnels}
        both = Pair(of_first, (), told, repository=repository, machines=named, **more)
        config = {"profile": "server", "host": "0.0.0.0", "serving": False, "api_url": api_url}
        for machine in made:
            shutil.copytree(repository.path, machine.disk / "repo")
            (machine.disk / "platform.yaml").write_text(json.dumps(config))
            secret = private_folder(machine.disk / "home" / "platform") / "secret"
            secret.write_text(PASSWORD)
            both.bring_up(machine)
        both.schedule_sweeps_alone()
        yield both


@pytest.mark.parametrize("whose", ["of the loop", "of its training"])
def test_a_host_that_loses_its_power_in_a_loop_is_replaced_by_the_other_and_comes_back(
    pair: Pair, whose: str
) -> None:
    loop = pair.start_loop(training={"seed": len(whose)})
    training = pair.host_of(f"{loop}:training:%")
    lost = pair.host_of(loop) if whose == "of the loop" else training
    lost.lose_power()
    began = time.monotonic()
    pair.until_state(loop, "COMPLETED")
    account, homes = pair.account, [each.disk / "home" for each in pair.machines.values()]
    assert account.completions(loop) == dict.fromkeys(STAGES, 1), account.stage_runs(loop)
    assert set(builds_of(homes).values()) == {1}, "nothing was built twice"
    for left in (account.unfinished, account.slots, partial(locks_held, pair.told[DATABASE_URL])):
        wait_until(lambda left=left: not left(), f"nothing is left: {left()}", LIMIT_S)
    took_s = time.monotonic() - began
    sys.stdout.write(f"{lost.name} was lost, training on {training.name}: {took_s:.0f} s\n")
    pair.bring_up(lost)
