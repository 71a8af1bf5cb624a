"""Roll back by hand, with nothing left out: from the decision to the last old answer a client got.

Registry, serving process, Envoy and clients are real. Each round releases a version until it
answers every request, then a person runs `falaj release rollback`. Counted is the time
from the moment that the record has of the decision to the last answer of that version.
"""

import os
import statistics

from flows.release import RegistryChampions, traffic_of
from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench, wait_until
from infra.bench.processes import run_python
from infra.bench.serving.clients import Answers
from infra.bench.serving.installation import MODEL, environment_of, make_champion
from infra.bench.serving.replicas import Replicas, replicas
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.rollout import Action
from tasks.kernel.settings import Settings
from tasks.release.config import ReleaseConfig, StepConfig
from tasks.release.ledger import ReleaseLedger
from tasks.release.rollout import Releasing

PER_S = 250.0
ROLL_BACK = ["-m", "falaj", "release", "rollback", MODEL, "--approver", "bench"]
FEW = 200
"""Answers that are waited for before and after."""
AT_ONCE = ReleaseConfig(steps=(StepConfig(name="all", candidate_percent=100, min_minutes=0),))


def version_of(head: bytes) -> str:
    """That gave an answer; empty where it was none."""
    return head.partition(b"x-falaj-version: ")[2].partition(b"\r\n")[0].decode()


def wait_for(answers: Answers, version: str) -> None:
    """Wait until `FEW` further answers have come, all of a version."""
    wanted = len(answers) + FEW

    def came() -> bool:
        newest = {version_of(head) for _, head in answers[-FEW:]}
        return len(answers) >= wanted and newest == {version}

    wait_until(came, f"{FEW} answers of version {version}", 120)


def figures(bench: Bench) -> Measured:
    """The slowest round."""
    rounds = bench.size(3, 1)
    with replicas(bench.folder / "home", 1, poll_s=0.3) as made:
        candidate = made.world.add(1)
        seconds = [_roll_back_under_load(made, candidate) for _ in range(rounds)]
    evidence = f"{rounds} rounds, median {statistics.median(seconds):.3f} s, {PER_S:.0f} requests/s"
    return [at_most("roll back by hand to the last old answer, s", max(seconds), 1.0, evidence)]


def _roll_back_under_load(made: Replicas, candidate: ModelVersionRef) -> float:
    """Seconds from the decision to the last answer of the candidate."""
    version, environment = str(candidate.version), {**os.environ, **environment_of(made.home)}
    settings = Settings.from_environment(environment)
    ledger = ReleaseLedger(settings.metadata_url)
    releasing = Releasing(ledger, traffic_of(settings), RegistryChampions(settings))
    make_champion(candidate, made.world.location)
    with made.load(PER_S) as answers:
        wait_for(answers, "1")
        release = releasing.begin(MODEL, AT_ONCE, "bench")
        wait_for(answers, version)
        run_python(ROLL_BACK, made.home / "bench.log", environment)
        wait_for(answers, "1")
    entries = ledger.entries(release.release_id)
    decided_s = next(e.at.timestamp() for e in entries if e.action is Action.ROLL_BACK)
    last_s = max(moment for moment, head in answers if version_of(head) == version)
    return max(0.0, last_s - decided_s)
