"""Roll back by hand, with nothing left out: from the decision to the last old answer a client got.

Registry, serving process, Envoy and clients are real. Each round releases a version until it
answers every request, then a person runs `falaj release rollback`. Counted is the time
from the moment that the record has of the decision to the last answer of that version.
"""

import os
import statistics
from dataclasses import dataclass

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
FEW = 200
"""Answers that are waited for before and after."""
AT_ONCE = ReleaseConfig(steps=(StepConfig(name="all", candidate_percent=100, min_minutes=0),))


@dataclass(frozen=True)
class Installation:
    """A serving process behind Envoy, and what releases its model."""

    made: Replicas

    @property
    def environment(self) -> dict[str, str]:
        """Of its commands."""
        return {**os.environ, **environment_of(self.made.home)}

    @property
    def releasing(self) -> Releasing:
        """The real ports."""
        settings = Settings.from_environment(self.environment)
        ledger = ReleaseLedger(settings.metadata_url)
        return Releasing(ledger, traffic_of(settings), RegistryChampions(settings))

    def roll_back(self) -> float:
        """Roll the open release back by hand; when that was decided, seconds since 1970."""
        words = ["-m", "falaj", "release", "rollback", MODEL, "--approver", "bench"]
        run_python(words, self.made.home / "bench.log", self.environment)
        ledger = self.releasing.ledger
        release = ledger.last_release(MODEL)
        assert release is not None
        entries = ledger.entries(release.release_id)
        return next(e.at.timestamp() for e in entries if e.action is Action.ROLL_BACK)


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
        installation, candidate = Installation(made), made.world.add(1)
        seconds = [_roll_back_under_load(installation, candidate) for _ in range(rounds)]
    evidence = f"{rounds} rounds, median {statistics.median(seconds):.3f} s, {PER_S:.0f} requests/s"
    return [at_most("roll back by hand to the last old answer, s", max(seconds), 1.0, evidence)]


def _roll_back_under_load(installation: Installation, candidate: ModelVersionRef) -> float:
    """Seconds from the decision to the last answer of the candidate."""
    version = str(candidate.version)
    make_champion(candidate, installation.made.world.location)
    with installation.made.load(PER_S) as answers:
        wait_for(answers, "1")
        installation.releasing.begin(MODEL, AT_ONCE, "bench")
        wait_for(answers, version)
        decided_s = installation.roll_back()
        wait_for(answers, "1")
    last_s = max(moment for moment, head in answers if version_of(head) == version)
    return max(0.0, last_s - decided_s)
