"""kill -9 at random moments of the real loop, on the platform as a user starts it.

`FALAJ_DRILL_KILLS` (default 10) says how often, `FALAJ_KILLS_SEED` (default 0) whom and when. Each
loop works on rows that no earlier one has seen, so every stage has work to do. What is killed comes
back by itself, as far as it does; the whole platform only by `up`, as after a power cut. After each
kill the databases are read with plain SQL, past all of the project's own code: see `Account`.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from infra.orchestration.client import is_running
from tests.support.host.processes import wait_until
from tests.support.platform.accounts import STAGES, Account
from tests.support.platform.whole_platform import (
    RUN,
    WholePlatform,
    environment_of,
    lives,
    tree_of,
    whole_platform,
)
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

KILLS = int(os.environ.get("FALAJ_DRILL_KILLS", "10"))
SEED = int(os.environ.get("FALAJ_KILLS_SEED", "0"))
LOOP_LIMIT_S = 3600
"""Generous, since a busy machine is ten times slower than a quiet one."""

LEFT_ALONE_S = 120
"""A loop that lies Crashed for so long is not started again by the watch; a person would do it."""
GONE_WITHIN_S, FREED_WITHIN_S = 10, 60
VICTIMS = (
    "engine of the loop",
    "engine of a stage",
    "rank",
    "guard of the ranks",
    "coordinator's worker",
    "stages' worker",
    "server",
    "supervisor",
    "everything",
)
SERVICES = {
    "coordinator's worker": "worker-coordinator",
    "stages' worker": "worker-cpu",
    "server": "prefect",
}


@dataclass(frozen=True)
class Kill:
    """One loop, what was killed in it, and what came of it."""

    victim: str
    after_s: float
    during: str
    outcome: str
    seconds: float
    problems: tuple[str, ...]

    def __str__(self) -> str:
        told = f"{self.victim:<21} at {self.after_s:5.1f} s, in {self.during:<16}"
        return (
            f"{told} {self.seconds:5.0f} s  {self.outcome}  {'; '.join(self.problems) or 'clean'}"
        )


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[WholePlatform]:
    with whole_platform(tmp_path) as platform:
        yield platform


def stage_at(platform: WholePlatform, loop: str) -> str:
    """The stage that a loop is in, for people."""
    runs = Account(platform.home).stage_runs(loop)
    return list(runs)[-1] if runs else "its beginning"


def found(platform: WholePlatform, victim: str, loop: str) -> list[psutil.Process]:
    """Processes that a victim's name means, at the moment."""
    if victim in SERVICES:
        service = platform.service(SERVICES[victim])
        return [service] if service else []
    if victim in ("supervisor", "everything"):
        return [platform.supervisor()]
    if victim in ("rank", "guard of the ranks"):
        return platform.training(victim.partition(" ")[0])
    of_loop = victim == "engine of the loop"
    engines = platform.engines()
    return [e for e in engines if (environment_of(e).get(RUN) == loop) == of_loop]


def struck(platform: WholePlatform, victim: str, loop: str, draw: random.Random) -> bool:
    """Kill one victim, as soon as there is one; False where the loop ended before.

    All that it had started is gone within `GONE_WITHIN_S`.
    """
    begun = time.monotonic()
    while not (candidates := found(platform, victim, loop)):
        if platform.state_of(loop)["type"] == "COMPLETED" or time.monotonic() - begun > 300:
            return False
        time.sleep(0.05)
    if victim in ("rank", "guard of the ranks"):
        time.sleep(draw.uniform(0, 3))  # a training is short: draw the moment within it
        candidates = found(platform, victim, loop) or candidates
    chosen = draw.choice(candidates)
    tree = platform.processes() if victim == "everything" else tree_of(chosen)
    for process in tree if victim == "everything" else [chosen]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(
        lambda: not any(lives(process) for process in tree),
        f"all that the {victim} had started is gone: {tree}",
        GONE_WITHIN_S,
    )
    if not is_running(platform.home):
        platform.up()
    return True


def brought_to_its_end(platform: WholePlatform, loop: str) -> str:
    """Wait for the end of a loop; retry it as a person would where nothing else does.

    Returns:
        How it came to its end.
    """
    by, crashed_since = "by itself", None
    deadline = time.monotonic() + LOOP_LIMIT_S
    while (state := platform.state_of(loop))["type"] != "COMPLETED":
        assert time.monotonic() < deadline, f"loop {loop} is {state}"
        if state["type"] != "CRASHED":
            crashed_since = None
        crashed_since = crashed_since or time.monotonic()
        left_alone = time.monotonic() - crashed_since > LEFT_ALONE_S
        if state["type"] == "FAILED" or (state["type"] == "CRASHED" and left_alone):
            code, said = platform.run("falaj", "--on-platform", "retry", loop)
            assert code == 0, said
            by = f"by command, after: {state['message']}"
        time.sleep(0.5)
    return f"{by}, attempts {state['run_count']}"


def problems_of(platform: WholePlatform, loop: str) -> list[str]:
    """All that is not as promised after a loop has ended; waits as long as the promises allow."""
    account, problems = Account(platform.home), []

    def check(holds: bool, said: str) -> None:
        if not holds:
            problems.append(said)

    for look, limit_s, what in (
        (platform.orphans, GONE_WITHIN_S, "orphans"),
        (account.unfinished, FREED_WITHIN_S, "stuck runs"),
        (account.leases, FREED_WITHIN_S, "leaked leases"),
        (account.slots, FREED_WITHIN_S, "leaked slots"),
    ):
        try:
            wait_until(lambda look=look: not look(), what, limit_s)
        except AssertionError:
            problems.append(f"{what}: {look()}")
    completed, steps = account.completions(loop), account.steps(loop)
    check(completed == dict.fromkeys(STAGES, 1), f"stages completed {completed}")
    orders = {name: steps.get(name) for name in map(lambda s: s.replace("-", " "), STAGES)}
    check(set(orders.values()) == {1}, f"stages ordered {orders}")
    check(not account.repeated_builds(), f"built twice: {account.repeated_builds()}")
    try:
        account.champion()
    except AssertionError as exc:
        problems.append(f"promotion half done: {exc}")
    return problems


def one_kill(platform: WholePlatform, victim: str, draw: random.Random, whole_s: float) -> Kill:
    """One loop, killed once; drawn again where it had ended before."""
    while True:
        platform.renew_data()
        platform.until_well()
        after_s = draw.uniform(0, whole_s)
        loop, began = platform.start_loop(), time.monotonic()
        if victim not in ("rank", "guard of the ranks"):
            time.sleep(after_s)
        if struck(platform, victim, loop, draw):
            break
    after_s = time.monotonic() - began
    during = stage_at(platform, loop)
    how = brought_to_its_end(platform, loop)
    seconds = time.monotonic() - began
    runs = Account(platform.home).stage_runs(loop)
    cut = [f"{stage} {'+'.join(states)}" for stage, states in runs.items() if len(states) > 1]
    outcome = ", ".join([f"Completed {how}", *cut])
    return Kill(victim, after_s, during, outcome, seconds, tuple(problems_of(platform, loop)))


@proves(Promise.INTERRUPT, "completed; no stage repeated, no orphan, no lease, no slot")
@proves(Promise.KILLED_WORKER, "no run is Running beyond a minute")
def test_a_loop_is_completed_whatever_is_killed_and_repeats_nothing(
    platform: WholePlatform,
) -> None:
    draw = random.Random(SEED)
    began = time.monotonic()
    loop = platform.start_loop()
    said = brought_to_its_end(platform, loop)
    whole_s = time.monotonic() - began
    assert not problems_of(platform, loop)
    sys.stdout.write(f"\nundisturbed: {whole_s:.0f} s, {said}\n")
    deck: list[str] = []
    table = []
    for _ in range(KILLS):
        deck = deck or draw.sample(VICTIMS, len(VICTIMS))
        table.append(one_kill(platform, deck.pop(), draw, whole_s))
        sys.stdout.write(f"{len(table):3} {table[-1]}\n")
        sys.stdout.flush()
    assert not [str(kill) for kill in table if kill.problems]
