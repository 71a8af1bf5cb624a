"""Machines without a common folder share one state: S3, PostgreSQL and Redis.

Each has a network, a disk and a clock of its own. What they share is the software alone.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.bench.processes import S3_KEY
from tasks.kernel.location import Location
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.clocks import Clock, make_clock
from tests.support.host.machines import DISK, HOST, Machine, machines
from tests.support.host.processes import wait_until
from tests.support.host.relay import Relay, relayed
from tests.support.platform.whole_platform import FINAL, WholePlatform, whole_platform
from tests.support.services.servers import postgres_server, redis_server, s3_server
from tests.support.state import make_bucket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ON_GPU_POOL = {"hardware_class": "gpu", "wait_s": 900}
URL = "s3://lake/state"


@dataclass
class Site:
    """A platform on the host, and machines that may work for it."""

    platform: WholePlatform
    variables: dict[str, str]
    machines: list[Machine]
    relays: dict[str, Relay]
    folder: Path

    def log(self, machine: Machine) -> str:
        file = self.folder / f"{machine.name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start_worker(self, machine: Machine, clock: Clock | None = None, **changed: str) -> None:
        """`falaj worker gpu` on a machine."""
        shutil.copytree(
            self.platform.repository.path,
            machine.disk / "repo",
            ignore=shutil.ignore_patterns("*.parquet", "*.csv"),
            dirs_exist_ok=True,
        )
        told = {
            **{name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ},
            "PYTHONPATH": str(PROJECT_ROOT),
            **self.variables,
            **(clock.environment if clock else {}),
            "FALAJ_HOME": str(DISK / "home"),
            "FALAJ_FEATURE_REPO": str(DISK / "repo"),
            "PREFECT_API_AUTH_STRING": self.platform.password,
            **changed,
        }
        words = [sys.executable, "-u", "-m", "falaj", "worker", "gpu"]
        machine.start(words, told, self.folder / f"{machine.name}.log")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        made = stack.enter_context(machines("far", "third"))
        s3 = stack.enter_context(s3_server())
        make_bucket(s3, "lake")
        database = stack.enter_context(postgres_server(folder))
        redis = stack.enter_context(redis_server(folder))
        relays: dict[str, Relay] = {}

        def reached(name: str, url: str) -> str:
            relays[name], address = stack.enter_context(relayed(HOST, url))
            return address

        def variables(place: Any) -> dict[str, str]:
            at = place("database", database)
            return {
                "FALAJ_STATE": URL,
                "FALAJ_DATABASE_URL": at,
                "FALAJ_REGISTRY_URL": at.replace("postgresql:", "postgresql+psycopg:"),
                "FALAJ_REDIS": place("redis", redis.connection_string),
                "FALAJ_PROFILE": "server",
                "AWS_ENDPOINT_URL": place("s3", s3),
                "AWS_ACCESS_KEY_ID": S3_KEY,
                "AWS_SECRET_ACCESS_KEY": S3_KEY,
                "AWS_REGION": "us-east-1",
            }

        near = variables(lambda _, url: url)
        platform = stack.enter_context(whole_platform(folder, "--no-serving", environment=near))
        api = reached("api", f"http://127.0.0.1:{platform.port}/api")
        yield Site(platform, {**variables(reached), "PREFECT_API_URL": api}, made, relays, folder)


def loop_on(site: Site) -> str:
    routing = {"training": ON_GPU_POOL, "conversion": ON_GPU_POOL}
    return site.platform.start_loop(routing=routing)


def test_a_worker_of_another_state_takes_no_work(site: Site, tmp_path: Path) -> None:
    far = site.machines[0]
    site.start_worker(far, FALAJ_STATE="s3://lake/another")
    wait_until(lambda: "location differ" in site.log(far), "it is refused", 120)
    assert "FALAJ_STATE" in site.log(far)
    far.kill()
    (far.disk / "home" / "identity").unlink()  # of the other state
    site.start_worker(far, FALAJ_DATABASE_URL="")
    wait_until(lambda: "database differ" in site.log(far), "it is refused", 120)
    far.kill()
    assert not site.platform.ask("POST", "/work_pools/gpu/workers/filter", {})
    shutil.rmtree(far.disk / "home")


def test_a_machine_without_a_common_folder_takes_stages_and_a_third_one_finishes(
    site: Site, tmp_path: Path
) -> None:
    far, third = site.machines
    clock = make_clock(far.disk, DISK)
    clock.jump_to(1 / 60)
    loop = loop_on(site)
    site.start_worker(far, clock)
    wait_until(lambda: "holds core(s)" in site.log(far), "it trains", 900)
    far.kill()
    site.start_worker(third)
    wait_until(lambda: site.platform.state_of(loop)["type"] in FINAL, "the loop has ended", 1500)
    sys.stderr.write(site.log(far)[-6000:] + "=======" + site.log(third)[-6000:])
    site.platform.check_completed_once(loop)
    held = Location.of(URL)
    assert held.entries("results")
