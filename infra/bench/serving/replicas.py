"""Several serving processes behind Envoy: what they answer together, and what is lost with one.

All is real: the processes as `falaj serve --replicas` keeps them, Envoy, clients with tokens over
TLS. Two cores hold clients, Envoy and servers, so throughput is not measured by the clock but by
CPU: a process that has a core of its own answers as many requests a second as it answers in a CPU
second.
"""

import os
import signal
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from infra.bench.figures import Figure, Measured, at_least, at_most
from infra.bench.parts import Bench, wait_until
from infra.bench.serving.clients import Answers, cpu_us, load, request
from infra.bench.serving.http_request import UNLOGGED, one_row
from infra.bench.serving.installation import (
    MODEL,
    BenchHome,
    Signer,
    Tabular,
    envoy,
    serving,
    write_settings,
)
from infra.gateway.config import GatewayFiles
from infra.gateway.envoy import Admin
from infra.orchestration.embedded import free_port
from infra.platform.services import replace_serving
from tasks.contracts.serving import Addresses, live_addresses

PER_S, NUM_CLIENTS = 500.0, 50
ROUNDS, SECONDS, LIMIT_S = 7, 2.0, 120
HEALTHY = r"cluster\.http-stable\.membership_healthy"


@dataclass(frozen=True)
class Replicas:
    """Serving processes behind Envoy on a state folder."""

    world: BenchHome
    signer: Signer
    port: int

    @property
    def home(self) -> Path:
        """The state folder."""
        return self.world.home

    def asking(self, subject: str = "somebody") -> bytes:
        """A request of a client."""
        return request(MODEL, one_row(), self.signer.token(f"infer:{MODEL}", sub=subject))

    @property
    def pids(self) -> list[int]:
        """Of those that answer."""
        return [int(one["pid"] or 0) for one in live_addresses(self.home)]

    def are_found(self, count: int) -> bool:
        """Whether so many answer, and Envoy sends them requests."""
        found = sum(Admin(GatewayFiles(self.home).folder).stats(HEALTHY).values())
        return len(self.pids) == found == count

    def load(self, per_s: float = PER_S) -> AbstractContextManager[Answers]:
        """Clients that ask without end, so often in all."""
        return load([self.asking(f"c{n}") for n in range(NUM_CLIENTS)], self.port, per_s)


@contextmanager
def replicas(home: Path, count: int, **settings: Any) -> Iterator[Replicas]:
    """So many serving processes of version 1 behind Envoy, all of them found."""
    ports, signer = {name: free_port() for name in ("edge", "http", "grpc")}, Signer()
    made = Replicas(BenchHome(home, Tabular), signer, ports["edge"])
    write_settings(home, signer, ports)
    made.world.add(0, promote=True)
    edge = {"security": {"edge": True}, **settings}
    with serving(home, ports, replicas=count, **edge), envoy(home):
        wait_until(lambda: made.are_found(count), "Envoy has found all", LIMIT_S)
        yield made


def during(made: Replicas, what: Callable[[Replicas], None]) -> Answers:
    """What clients got before, while and after something was done."""
    with made.load() as answers:
        await_more(answers)
        what(made)
        await_more(answers)
    return answers


def await_more(answers: Answers) -> None:
    """Wait for as many answers as `PER_S` gives in a second."""
    wanted = len(answers) + PER_S
    wait_until(lambda: len(answers) > wanted, "a second of answers", LIMIT_S)


def kill_one(made: Replicas) -> None:
    """Kill a process; returns when it is back."""
    count, victim = len(made.pids), made.pids[-1]
    os.kill(victim, signal.SIGKILL)
    back = "the process is back"
    wait_until(lambda: victim not in made.pids and made.are_found(count), back, LIMIT_S)


def replace_all(made: Replicas) -> None:
    """Replace all processes, one by one."""
    replace_serving(made.home, LIMIT_S)


def answers_per_cpu_s(folder: Path, rounds: int, seconds: float) -> Iterator[list[float]]:
    """In each round, of one process that serves alone and of two that serve together.

    They are asked directly and all at one time, each by as many clients: with fewer, or on a busier
    machine, a process has smaller batches and colder caches. What Envoy costs is measured apart.
    """
    live = []
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        for count in (1, 2):
            home, ports = folder / f"direct-{count}", {"http": free_port(), "grpc": free_port()}
            BenchHome(home, Tabular).add(7, promote=True)
            stack.enter_context(serving(home, ports, replicas=count, **UNLOGGED))
            live += live_addresses(home)

        def asked(one: Addresses) -> float:
            process, port = psutil.Process(int(one["pid"] or 0)), str(one["http"]).split(":")[-1]
            body = request(MODEL, one_row())
            return 1e6 / cpu_us([process], int(port), body, NUM_CLIENTS, seconds)[0]

        for _ in range(rounds):
            yield list(pool.map(asked, live))


def figures(bench: Bench) -> Measured:
    """Throughput of two to that of one; what is lost with a process, and in a replacement."""
    rounds, seconds = bench.size((ROUNDS, SECONDS), (1, 1.0))
    rates = list(answers_per_cpu_s(bench.folder, rounds, seconds))
    with replicas(bench.folder / "home", 2, **UNLOGGED) as two:
        gone, renewed = during(two, kill_one), during(two, replace_all)
    ratio = statistics.median((first + second) / alone for alone, first, second in rates)
    evidence = "alone, and two together: " + "; ".join(
        f"{alone:.0f}, {first:.0f} + {second:.0f}/s" for alone, first, second in rates
    )
    return [
        at_least("answers of two processes with a core each to one", ratio, 1.8, evidence),
        _lost(f"lost of {PER_S:.0f}/s when one of two is killed", gone),
        _lost(f"refused of {PER_S:.0f}/s while both are replaced", renewed),
    ]


def _lost(name: str, answers: Answers) -> Figure:
    well = [moment for moment, head in answers if head.startswith(b"http/1.1 200")]
    away_s = max(later - earlier for earlier, later in pairwise(well))
    evidence = f"of {len(answers)}, at most {away_s:.2f} s without an answer"
    return at_most(name, len(answers) - len(well), 0, evidence)
