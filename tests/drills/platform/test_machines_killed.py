"""kill -9 of all that a loop needs, where its state is on servers and its stages on machines.

`FALAJ_DRILL_KILLS` (default 10) says how often, `FALAJ_KILLS_SEED` (default 0) when: in turn the
coordinator's worker, the store, the database, Redis, either machine. Servers come back with their
data after some seconds, a machine with its disk. Prefect has its records in the database where that
has `pg_trgm` (Debian: postgresql). What is read afterwards is read by plain SQL and S3.
"""

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import boto3
import psutil
import pytest

from infra.bench.operation.state import BUCKET
from infra.bench.running import QUICK
from tests.support.host.machines import Machine
from tests.support.host.processes import wait_until
from tests.support.platform.accounts import STAGES, Account
from tests.support.platform.site import Site, builds_of, locks_held, site
from tests.support.platform.whole_platform import LIMIT_S, what_stays
from tests.support.services.restarting import Server, end_started
from tests.support.services.servers import answers, postgres_with_trigrams
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]
KILLS = int(os.environ.get("FALAJ_DRILL_KILLS", "10"))
SEED = int(os.environ.get("FALAJ_KILLS_SEED", "0"))
TRAINS = 0.25
"""Share of a loop that its training takes; on a machine, where one is killed, it is in time."""
AWAY_S = 5.0
LEFT_ALONE_S = 240
"""A loop that failed for so long is not started again by the watch; a person would do it."""
FREED_WITHIN_S = 120
BUILD = r"state/artifacts/[^/]+/[^/]+\.json"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with site(folder, ("far", "near"), postgres_with_trigrams()) as made:
        for machine in made.machines:
            made.start_worker(machine)
        yield made
        end_started()


def server_at(url: str) -> Server:
    """The process that listens at the port of a URL of this host."""
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
    for process in psutil.process_iter():
        try:
            connections = process.net_connections("tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            # The first of a family of processes that have inherited it.
            while (above := process.parent()) and above.name() == process.name():
                process = above
            return Server(tuple(process.cmdline()), process.pid)
    raise AssertionError(f"nothing listens at {url}")


def strike(shared: Site, victim: str) -> None:
    """Kill a victim, and let it come back."""
    if victim == "coordinator":
        service = shared.platform.service("worker-coordinator")
        assert service
        service.kill()
    elif victim in shared.servers:
        shared.servers[victim].restart(signal.SIGKILL, AWAY_S)
        wait_until(lambda: answers(shared.database), "PostgreSQL answers", 60)
    else:
        (machine,) = [each for each in shared.machines if each.name == victim]
        machine.kill()
        shared.start_worker(machine)


def problems_of(shared: Site, loop: str) -> list[str]:
    """All that is not as promised after a loop has ended; waits as long as the promises allow."""
    account = shared.platform.account
    homes = [shared.platform.home, *(machine.disk / "home" for machine in shared.machines)]
    leases = [Account(home).leases for home in homes]
    held = partial(locks_held, shared.database)
    freed = (account.unfinished, account.slots, held, *leases)
    problems = [told for left in freed for told in what_stays(left, "left", FREED_WITHIN_S)]
    completed = account.completions(loop)
    problems += [f"stages: {completed}"] * (completed != dict.fromkeys(STAGES, 1))
    problems += [f"built {n} times: {what}" for what, n in builds_of(homes).items() if n > 1]
    problems += wrong_in_store(shared, account)
    return problems


def wrong_in_store(shared: Site, account: Account) -> list[str]:
    """Content that a build names and the store has not, uploads without an end, half promotions."""
    client = boto3.client("s3", endpoint_url=shared.s3, region_name="us-east-1", **shared.keys)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    held = {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", ())}
    records = shared.folder / "records"
    for name in (name for name in held if "/promotion/" in name):
        copy = records / name.removeprefix("state/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(BUCKET, name, str(copy))
    replace(account, home=records).champion()
    missing = []
    for name in (name for name in held if re.fullmatch(BUILD, name)):
        build = json.loads(client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
        for file, (sha256, num_bytes) in build["files"].items():
            if held.get(f"state/objects/{sha256[:2]}/{sha256}") != num_bytes:
                missing.append(f"lacks {name}: {file}")
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return [*missing, *(f"upload {each['Key']}" for each in uploads)]


@proves(Promise.INTERRUPT, "on machines of their own: completed; nothing repeated, nothing left")
def test_a_loop_on_machines_is_completed_whatever_is_killed(shared: Site) -> None:
    redis = Server(shared.redis.command, shared.redis.pid)
    shared.servers.update(s3=server_at(shared.s3), database=server_at(shared.database), redis=redis)
    draw = random.Random(SEED)
    machines: list[Machine] = shared.machines
    victims = ("coordinator", *shared.servers, *(machine.name for machine in machines))
    whole_s, wrong = 0.0, list[str]()
    for kill in range(KILLS + 1):  # nothing is killed in the first
        if kill % 3 == 1:
            shared.platform.renew_data()
        began, at_s = time.monotonic(), draw.uniform(0, whole_s)
        loop = shared.start_loop(**QUICK, training={"seed": kill + 1, "max_epochs": 2})
        victim, stage = "none", ""
        if kill:
            victim = victims[(SEED + kill - 1) % len(victims)]
            if victim in {machine.name for machine in machines}:
                trains = lambda loop=loop: "training" in shared.platform.account.stage_runs(loop)  # noqa: E731
                wait_until(trains, "it trains", LIMIT_S)
                at_s *= TRAINS
            time.sleep(at_s)
            stage = "".join([*shared.platform.account.stage_runs(loop)][-1:])
            strike(shared, victim)
        how = shared.platform.bring_to_its_end(loop, LEFT_ALONE_S)
        took_s = time.monotonic() - began
        whole_s = min(whole_s or took_s, took_s)
        problems = problems_of(shared, loop)
        told = f"{kill:>3} {victim:<12} at {at_s:5.1f} s, {stage or 'before all stages'}: {how}"
        told += f" after {took_s:.0f} s; {problems or 'clean'}"
        sys.stdout.write(f"{time.strftime('%X')} {told}\n")
        sys.stdout.flush()
        wrong += [told] if problems else []
    assert not wrong
