"""Roll back by hand, with nothing left out: from the decision to the last old answer a client got.

Registry, serving process, Envoy and clients are real. Each round releases a version until it
answers every request, then a person runs `falaj release rollback`. Counted is the time
from the moment that the record has of the decision to the last answer of that version.
"""

import asyncio
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flows.release import RegistryChampions, traffic_of
from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench, wait_until
from infra.bench.processes import run_python
from infra.bench.serving.clients import ask, request
from infra.bench.serving.installation import (
    COLUMNS,
    MODEL,
    BenchHome,
    Signer,
    environment_of,
    envoy,
    make_champion,
    serving,
    write_settings,
)
from infra.orchestration.embedded import free_port
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.rollout import Action
from tasks.kernel.settings import Settings
from tasks.release.config import ReleaseConfig, StepConfig
from tasks.release.ledger import ReleaseLedger
from tasks.release.rollout import Releasing

ROUNDS = 3
BOUND_S = 1.0
NUM_CLIENTS = 40
PER_S = 250.0
FEW = 200
"""Answers that are waited for before and after."""
LIMIT_S = 120
AT_ONCE = ReleaseConfig(steps=(StepConfig(name="all", candidate_percent=100, min_minutes=0),))
Answers = list[tuple[float, str]]
"""Moment and version of each."""
BODY = json.dumps(
    {
        "inputs": [
            {"name": "rows", "shape": [1, COLUMNS], "datatype": "FP32", "data": [0.5] * COLUMNS}
        ]
    }
).encode()


@dataclass(frozen=True)
class Installation:
    """A serving process behind Envoy, and what releases its model."""

    world: BenchHome
    signer: Signer
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Of its commands."""
        return {**os.environ, **environment_of(self.world.home)}

    @property
    def releasing(self) -> Releasing:
        """The real ports."""
        settings = Settings.from_environment(self.environment)
        ledger = ReleaseLedger(settings.metadata_url)
        return Releasing(ledger, traffic_of(settings), RegistryChampions(settings))

    def roll_back(self) -> float:
        """Roll the open release back by hand; when that was decided, seconds since 1970."""
        words = ["-m", "falaj", "release", "rollback", MODEL, "--approver", "bench"]
        run_python(words, self.world.home / "bench.log", self.environment)
        ledger = self.releasing.ledger
        release = ledger.last_release(MODEL)
        assert release is not None
        entries = ledger.entries(release.release_id)
        return next(e.at.timestamp() for e in entries if e.action is Action.ROLL_BACK)


@contextmanager
def load(made: Installation) -> Iterator[Answers]:
    """Clients, each with a token and a connection of its own, that ask without end."""
    answers: Answers = []
    stopping = threading.Event()
    requests = [
        request(MODEL, BODY, made.signer.token(f"infer:{MODEL}", sub=f"c{n}"))
        for n in range(NUM_CLIENTS)
    ]

    def next_in(head: bytes) -> float | None:
        version = head.partition(b"x-falaj-version: ")[2].partition(b"\r\n")[0].decode()
        answers.append((time.time(), version))
        return None if stopping.is_set() else NUM_CLIENTS / PER_S

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: asyncio.run(ask(requests, made.port, next_in, tls=True)))
        try:
            yield answers
        except TimeoutError:
            if asking.done():
                asking.result()  # raises what a client met
            raise
        finally:
            stopping.set()
        asking.result(LIMIT_S)


def wait_for(answers: Answers, version: str) -> None:
    """Wait until `FEW` further answers have come, all of a version."""
    wanted = len(answers) + FEW

    def came() -> bool:
        return len(answers) >= wanted and all(of == version for _, of in answers[-FEW:])

    wait_until(came, f"{FEW} answers of version {version}", LIMIT_S)


def figures(bench: Bench) -> Measured:
    """The slowest round."""
    rounds = bench.size(ROUNDS, 1)
    with _installation(bench.folder) as (installation, candidate):
        seconds = [_roll_back_under_load(installation, candidate) for _ in range(rounds)]
    evidence = f"{rounds} rounds, median {statistics.median(seconds):.3f} s, {PER_S:.0f} requests/s"
    return [at_most("roll back by hand to the last old answer, s", max(seconds), BOUND_S, evidence)]


def _roll_back_under_load(installation: Installation, candidate: ModelVersionRef) -> float:
    """Seconds from the decision to the last answer of the candidate."""
    version = str(candidate.version)
    make_champion(candidate, installation.world.location)
    with load(installation) as answers:
        wait_for(answers, "1")
        installation.releasing.begin(MODEL, AT_ONCE, "bench")
        wait_for(answers, version)
        decided_s = installation.roll_back()
        wait_for(answers, "1")
    return max(0.0, max(moment for moment, of in answers if of == version) - decided_s)


@contextmanager
def _installation(folder: Path) -> Iterator[tuple[Installation, ModelVersionRef]]:
    """Version 1 serves behind Envoy; version 2 is registered."""
    home, signer = folder / "home", Signer()
    ports = {name: free_port() for name in ("edge", "http", "grpc")}
    world = BenchHome(home)
    write_settings(home, signer, ports)
    world.add(0, promote=True)
    with serving(home, ports, security={"edge": True}, poll_s=0.3), envoy(home):
        yield Installation(world, signer, ports["edge"]), world.add(1)
