"""Several serving processes behind Envoy: what they answer together, and what is lost with one.

All is real: the processes as `falaj serve --replicas` keeps them, Envoy, clients with tokens over
TLS. Two cores hold clients, Envoy and servers, so throughput is not measured by the clock but by
CPU: a process that has a core of its own answers as many requests a second as it answers in a CPU
second, and of two the busier one is the bound.
"""

import asyncio
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from infra.bench.figures import Measured, at_least, at_most, reported
from infra.bench.parts import Bench, wait_until
from infra.bench.processes import run_python, running
from infra.bench.serving.clients import ask, request
from infra.bench.serving.http_request import UNLOGGED, one_row
from infra.bench.serving.installation import (
    MODEL,
    BenchHome,
    Signer,
    Tabular,
    environment_of,
    envoy,
    write_settings,
)
from infra.gateway.config import GatewayFiles
from infra.gateway.envoy import Admin
from infra.orchestration.embedded import free_port
from tasks.contracts.serving import live_addresses
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

PER_S, SHARED_PER_S, NUM_CLIENTS = 500.0, 150.0, 50
ROUNDS, SECONDS, LIMIT_S = 5, 4.0, 120
MOST_HEALTHY = r"cluster\.http-stable\.membership_healthy"
TIMES = 1.8


@dataclass
class Asked:
    """What clients got: moments of answers, and of each other status."""

    answered: list[float] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)

    @property
    def evidence(self) -> str:
        """In words."""
        return (
            f"{len(self.answered)} answered, {len(self.lost)} not; at most {self.away_s:.2f} s "
            "without an answer"
        )

    @property
    def away_s(self) -> float:
        """The longest time without an answer."""
        gaps = zip(self.answered, self.answered[1:], strict=False)
        return max((later - earlier for earlier, later in gaps), default=0.0)


@dataclass(frozen=True)
class Replicas:
    """Serving processes behind Envoy on a state folder."""

    home: Path
    port: int
    body: bytes

    @property
    def pids(self) -> list[int]:
        """Of those that answer."""
        return [int(one["pid"] or 0) for one in live_addresses(self.home)]

    @property
    def num_healthy(self) -> int:
        """As Envoy sees them."""
        admin = Admin(GatewayFiles(self.home).folder)
        return sum(admin.stats(MOST_HEALTHY).values())

    @contextmanager
    def load(self, per_s: float = PER_S) -> Iterator[Asked]:
        """Clients that ask without end, so often in all."""
        found, stopping = Asked(), threading.Event()

        def next_in(head: bytes) -> float | None:
            if head.startswith(b"http/1.1 200"):
                found.answered.append(time.monotonic())
            else:
                found.lost.append(head)
            return None if stopping.is_set() else NUM_CLIENTS / per_s

        asked = [self.body] * NUM_CLIENTS
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(
                lambda: asyncio.run(ask(asked, self.port, next_in, tls=True, any_status=True))
            )
            try:
                yield found
            finally:
                stopping.set()
            asking.result(LIMIT_S)


def answers_per_cpu_s(made: Sequence[Replicas], seconds: float) -> list[float]:
    """Answers in a second in which the busiest process of each has a core of its own.

    All are asked at one time, and each process equally often: one that is asked less often has
    smaller batches, and on a busier machine colder caches.
    """
    before = [{pid: _cpu_s(pid) for pid in one.pids} for one in made]
    with ExitStack() as stack:
        found = [stack.enter_context(one.load(SHARED_PER_S * len(one.pids))) for one in made]
        time.sleep(seconds)
    return [
        len(asked.answered) / max(_cpu_s(pid) - was for pid, was in spent.items())
        for asked, spent in zip(found, before, strict=True)
    ]


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def replicas(home: Path, count: int) -> Iterator[Replicas]:
    """So many serving processes behind Envoy, all of them well."""
    ports = {name: free_port() for name in ("edge", "http", "grpc")}
    signer, environment = Signer(), environment_of(home)
    BenchHome(home, Tabular).add(7, promote=True)
    write_settings(home, signer, ports)
    repo = Path(environment["FALAJ_FEATURE_REPO"])
    shutil.copytree(PROJECT_ROOT / DEFAULT_FEATURE_REPO, repo)
    followed = {"models": [{"name": MODEL, "on_move": "offer"}], "security": {"edge": True}}
    (repo / "serving.yaml").write_text(yaml.safe_dump(followed | UNLOGGED))
    command = [sys.executable, "-m", "falaj", "--home", str(home), "serve"]
    numbers = {"replicas": count, "http-port": ports["http"], "grpc-port": ports["grpc"]}
    command += [f"--{name}={number}" for name, number in numbers.items()]
    token = signer.token(f"infer:{MODEL}")
    made = Replicas(home, ports["edge"], request(MODEL, one_row(), token))

    def are_up() -> bool:
        return len(made.pids) == count

    with running(command, home.with_suffix(".log"), are_up, environment), envoy(home):
        wait_until(lambda: made.num_healthy == count, "Envoy has found all", LIMIT_S)
        yield made


def killed(made: Replicas) -> Asked:
    """One of the processes is killed under load, and comes back; what clients got meanwhile."""
    count, victim = len(made.pids), made.pids[-1]

    def is_back() -> bool:
        return victim not in made.pids and len(made.pids) == made.num_healthy == count

    with made.load() as found:
        _some(found)
        os.kill(victim, signal.SIGKILL)
        wait_until(is_back, "the process is back", LIMIT_S)
        _some(found)
    return found


def replaced(made: Replicas) -> Asked:
    """All processes are replaced one by one under load; what clients got meanwhile."""
    words = ["-m", "falaj", "--home", str(made.home), "serve", "replace"]
    with made.load() as found:
        _some(found)
        run_python(words, made.home.with_suffix(".replaced.log"))
        _some(found)
    return found


def _some(found: Asked) -> None:
    wanted = len(found.answered) + PER_S
    wait_until(lambda: len(found.answered) > wanted, "a second of answers", LIMIT_S)


def figures(bench: Bench) -> Measured:
    """Throughput of two to that of one; what is lost with a process, and in a replacement."""
    rounds, seconds = bench.size((ROUNDS, SECONDS), (1, 2.0))
    with replicas(bench.folder / "one", 1) as one, replicas(bench.folder / "two", 2) as two:
        found = [answers_per_cpu_s((one, two), seconds) for _ in range(rounds)]
        gone, renewed, alone = killed(two), replaced(two), killed(one)
    first, both = (statistics.median(rates) for rates in zip(*found, strict=True))
    ratio = statistics.median(two / one for one, two in found)
    return [
        at_least(
            "throughput of two processes with a core each to one",
            ratio,
            TIMES,
            f"{both:.0f} and {first:.0f} answers/s by CPU seconds, {rounds} rounds",
        ),
        *(
            at_most(name, float(len(asked.lost)), 0, asked.evidence)
            for name, asked in (
                (f"lost of {PER_S:.0f}/s when one of two is killed", gone),
                (f"refused of {PER_S:.0f}/s while both are replaced", renewed),
            )
        ),
        reported("without an answer when the only one is killed, s", alone.away_s, alone.evidence),
    ]
