"""Two hosts, each with a whole `falaj up`, on one PostgreSQL, Redis and S3; one loses its power.

Its network is gone first, so nobody hears of it: no connection is closed. Then all of it ends.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
import pytest
import yaml

from infra.platform.config import DATABASE_URL, REDIS_URL
from infra.platform.files import Endpoint
from infra.platform.services import has_prefect_redis
from tasks.kernel.settings import PROJECT_ROOT
from tasks.metadata.database import KEEP_ALIVE, held_everywhere
from tests.support.host.machines import DISK, HOST, Machine, machines
from tests.support.host.processes import wait_until
from tests.support.host.relay import balanced, relayed
from tests.support.platform.accounts import STAGES
from tests.support.platform.site import BUCKET, built_twice, locks_held, state_variables
from tests.support.platform.whole_platform import FINAL, WholePlatform, platform_repository
from tests.support.services.servers import (
    admit,
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
NETWORK, PORT, LIMIT_S = f"{HOST}/24", 4200, 1200
REACHED = (f"listen_addresses=127.0.0.1,{HOST}", "max_connections=90")
NOTICES = tuple(f"tcp_{name}={seconds}" for name, seconds in KEEP_ALIVE.items())
"""As the page on operation advises, for the connections of Prefect and MLflow."""
GONE_S = KEEP_ALIVE["keepalives_idle"] + (
    KEEP_ALIVE["keepalives_interval"] * KEEP_ALIVE["keepalives_count"]
)
HOLDING = """
import time, pathlib
from tasks.metadata.database import held_everywhere
with held_everywhere(pathlib.Path("/mnt/home/some.lock")):
    print("it is held", flush=True)
    time.sleep(3600)
"""


def environment(**more: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
    home, repo = str(DISK / "home"), str(DISK / "repo")
    named = {"FALAJ_HOME": home, "FALAJ_FEATURE_REPO": repo, "PYTHONPATH": str(PROJECT_ROOT)}
    return {**passed, **named, **more}


def test_the_lock_of_a_machine_that_lost_its_power_is_free_after_the_keep_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        # Without a second one the host's own end would have no carrier, and Linux counts no probe.
        lone, _ = stack.enter_context(machines("lone", "other"))
        near = stack.enter_context(postgres_server(tmp_path, None, REACHED[0]))
        admit(near, NETWORK)
        far, log = near.replace("127.0.0.1", HOST), tmp_path / "lone.log"
        told = environment(FALAJ_DATABASE_URL=far)
        lone.start([sys.executable, "-c", HOLDING], told, log)
        wait_until(lambda: "it is held" in log.read_text(), "it is held", 120)
        lone.connect("down")
        lost = time.monotonic()
        lone.kill()
        assert locks_held(near) == 1, "the server knows nothing of it yet"
        monkeypatch.setenv("FALAJ_DATABASE_URL", near)
        monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
        with held_everywhere(tmp_path / "some.lock", wait_s=2 * GONE_S):
            sys.stdout.write(f"the lock was free {time.monotonic() - lost:.0f} s after the loss\n")


@dataclass(kw_only=True)
class Pair(WholePlatform):
    """Both hosts as one platform, behind a balancer; `home` is the first one's."""

    machines: list[Machine]
    told: Mapping[str, str]
    tunnels: Mapping[int, str]
    balancer: int
    logs: Path

    @property
    def endpoint(self) -> Endpoint:
        url = f"http://{HOST}:{self.balancer}"
        return Endpoint(
            api_url=f"{url}/api",
            ui_url=url,
            mlflow_url=url,
            local_mlflow_url=url,
            pid=0,
            profile="server",
        )

    def bring_up(self, machine: Machine) -> None:
        """`falaj up` on a machine, to its end, and tunnels for what must be encrypted."""
        machine.connect()
        for port, target in self.tunnels.items():
            relay = [sys.executable, "-m", "tests.support.host.relay", str(port), HOST, target]
            machine.start(relay, self.told, self.logs / "tunnels.log")
        words = [sys.executable, "-u", "-m", "falaj", "up", "--config", f"{DISK}/platform.yaml"]
        log = self.logs / f"{machine.name}.log"
        machine.start(words, self.told, log)
        code = machine.started[-1].wait(LIMIT_S)
        assert code == 0, log.read_text()

    def host_of(self, run: str) -> Machine:
        """The machine on which a run began."""
        labels = self.ask("GET", f"/flow_runs/{run}")["labels"]
        (machine,) = [each for each in self.machines if each.name == labels["falaj.host"]]
        return machine

    def running(self, loop: str, stage: str) -> str:
        """The run of a stage that a host has begun; waits for it."""

        def found() -> list[str]:
            runs = self.stage_runs(loop)
            return [
                str(run["id"])
                for run in runs
                if run["state_type"] == "RUNNING"
                and f":{stage}:" in str(run["idempotency_key"])
                and "falaj.host" in run["labels"]
            ]

        return str(wait_until(found, f"{stage} runs", LIMIT_S)[0])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        made = stack.enter_context(machines("left", "right"))
        near = stack.enter_context(postgres_server(folder, PROGRAMS, *REACHED, *NOTICES))
        admit(near, NETWORK)
        metadata = new_database(near)
        s3 = stack.enter_context(s3_server())
        make_bucket(s3, BUCKET)
        redis = stack.enter_context(redis_server(folder)).connection_string
        reached = [stack.enter_context(relayed(HOST, url)) for url in (s3, redis)]
        port = stack.enter_context(
            balanced(HOST, *((f"10.91.77.{n}", PORT) for n in range(2, 2 + len(made))))
        )
        platforms, metadata_far = (url.replace("127.0.0.1", HOST) for url in (near, metadata))
        stores = {DATABASE_URL: platforms, REDIS_URL: f"redis://{reached[1]}/0"}
        told = environment(**state_variables(reached[0], metadata_far, reached[1]), **stores)
        registry = re.sub(r"@[^/]+", f"@127.0.0.1:{PORT + 1}", told["FALAJ_REGISTRY_URL"])
        told |= {"FALAJ_REGISTRY_URL": registry, "FALAJ_REDIS": f"127.0.0.1:{PORT + 2}"}
        servers = (metadata_far, f"{reached[1]}/")
        ports = [re.findall(rf"{HOST}:(\d+)/", url)[0] for url in servers]
        repository = platform_repository(folder)
        chosen = {"profile": "server", "host": "0.0.0.0", "serving": False}
        chosen["api_url"] = f"http://{HOST}:{port}/api"
        for machine in made:
            shutil.copytree(repository.path, machine.disk / "repo")
            (machine.disk / "platform.yaml").write_text(yaml.safe_dump(chosen))
            secret = machine.disk / "home" / "platform" / "secret"
            secret.parent.mkdir(parents=True, mode=0o700)
            secret.write_text("admin:of-the-drill\n")
            secret.chmod(0o600)
        both = Pair(
            home=made[0].disk / "home",
            environment={DATABASE_URL: near, "FALAJ_DATABASE_URL": metadata},
            repository=repository,
            machines=made,
            told=told,
            tunnels=dict(enumerate(ports, start=PORT + 1)),
            balancer=port,
            logs=folder,
        )
        for machine in made:
            both.bring_up(machine)
        both.schedule_sweeps_alone()
        yield both


@pytest.mark.parametrize("stage", ["of the loop", "of its training"])
def test_a_host_that_loses_its_power_is_replaced_by_the_other_and_comes_back(
    pair: Pair, stage: str
) -> None:
    pair.renew_data()
    for machine in pair.machines:
        shutil.copytree(pair.repository.path, machine.disk / "repo", dirs_exist_ok=True)
    loop, began = pair.start_loop(), time.monotonic()
    training = pair.running(loop, "training")
    lost = pair.host_of(loop if stage == "of the loop" else training)
    sys.stdout.write(f"loop on {pair.host_of(loop).name}, training on {lost.name}\n")
    lost.connect("down")
    lost.kill()
    wait_until(lambda: pair.state_of(loop)["type"] in FINAL, "the loop has ended", LIMIT_S)
    sys.stdout.write(f"{lost.name} was lost; ended after {time.monotonic() - began:.0f} s\n")
    account = pair.account
    assert pair.state_of(loop)["type"] == "COMPLETED", pair.state_of(loop)
    assert account.completions(loop) == dict.fromkeys(STAGES, 1), account.stage_runs(loop)
    assert not built_twice(machine.disk / "home" for machine in pair.machines)
    held = partial(locks_held, pair.environment[DATABASE_URL])
    for left in (account.unfinished, account.slots, held):
        wait_until(lambda left=left: not left(), f"nothing is left: {left()}", 180)
    address = f"10.91.77.{2 + pair.machines.index(lost)}"
    query = f"SELECT count(*) FROM pg_stat_activity WHERE client_addr = '{address}'"
    with psycopg.connect(pair.environment[DATABASE_URL]) as connection:
        assert connection.execute(query.encode()).fetchall() == [(0,)], "its sessions have ended"
    pair.bring_up(lost)
