"""Roll back by hand, with nothing left out: from the decision to the last old answer a client got.

Registry, serving process, Envoy and clients are real. Each round releases a version until it
answers every request, then a person runs `python -m flows release rollback`. Counted is the time
from the moment that the record has of the decision to the last answer of that version.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from infra.bench.figures import Figure, at_most
from tests.support.conversion.programs import Decided
from tests.support.release.released import Load, Whole, whole_installation
from tests.support.serving.served import FLIGHTS

ROUNDS = 3
BOUND_S = 1.0
FEW = 200
"""Answers that are waited for before and after."""


def release_whole_figures() -> list[Figure]:
    """The figure of the table: the slowest round."""
    with (
        tempfile.TemporaryDirectory(prefix="falaj-release-") as folder,
        whole_installation(Path(folder), [Decided(0), Decided(1)]) as whole,
    ):
        rounds = [roll_back_under_load(whole, "2") for _ in range(ROUNDS)]
    told = f"{ROUNDS} rounds, median {statistics.median(rounds):.3f} s, 250 requests/s by Envoy"
    return [at_most("roll back by hand to the last old answer, s", max(rounds), BOUND_S, told)]


def roll_back_under_load(whole: Whole, candidate: str) -> float:
    """Seconds from the decision to the last answer of the candidate.

    Args:
        whole: an installation that serves another version.
        candidate: goes to all clients first, whatever it answers.
    """
    whole.begin(candidate)
    with Load(whole) as load:
        while whole.release.current.name != "all":
            whole.command("release", "promote", FLIGHTS, "--approver", "bench")
        load.wait_for(FEW)
        whole.command("release", "rollback", FLIGHTS, "--approver", "bench")
        load.wait_for(FEW)
    return load.last_of(candidate) - whole.decided_at()
