"""kill -9 at random moments of the real loop, on the platform as a user starts it.

`FALAJ_DRILL_KILLS` (default 10) says how often, `FALAJ_KILLS_SEED` (default 0) whom and when. Each
loop works on rows that no earlier one has seen, so every stage has work to do. What is killed comes
back by itself, as far as it does; the whole platform only by `up`, as after a power cut. After each
kill the databases are read with plain SQL, past all of the project's own code: see `Account`.
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from infra.orchestration.client import is_running
from infra.platform.supervisor import GRACE_S, KILL_MARGIN_S
from tasks.control.recovery.judge import TASK_RUN_GRACE_S
from tests.support.host.processes import wait_until
from tests.support.platform.accounts import STAGES
from tests.support.platform.whole_platform import (
    RUN,
    WholePlatform,
    environment_of,
    lives,
    tree_of,
    what_stays,
    whole_platform,
)
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

KILLS = int(os.environ.get("FALAJ_DRILL_KILLS", "10"))
SEED = int(os.environ.get("FALAJ_KILLS_SEED", "0"))
LEFT_ALONE_S = 120
"""A loop that lies Crashed for so long is not started again by the watch; a person would do it."""
GONE_WITHIN_S = GRACE_S + KILL_MARGIN_S
"""A guard gives what it ends that long: on a busy machine an engine needs some of it."""
FREED_WITHIN_S = 60
IN_TRAINING = ("rank", "guard")
SERVICES = {
    "coordinator's worker": "worker-coordinator",
    "stages' worker": "worker-cpu",
    "server": "prefect",
}
VICTIMS = (
    *("engine of the loop", "engine of a stage", "supervisor", "everything"),
    *(*IN_TRAINING, *SERVICES),
)


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[WholePlatform]:
    with whole_platform(tmp_path) as platform:
        yield platform


def found(platform: WholePlatform, victim: str, loop: str) -> list[psutil.Process]:
    """Processes that a victim's name means, at the moment."""
    if victim in SERVICES:
        service = platform.service(SERVICES[victim])
        return [service] if service else []
    if victim in ("supervisor", "everything"):
        return [platform.supervisor()]
    if victim in IN_TRAINING:
        return platform.training(victim)
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
    if victim in IN_TRAINING:
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
        code, said = platform.up()
        assert code == 0, said
    return True


def problems_of(platform: WholePlatform, loop: str) -> list[str]:
    """All that is not as promised after a loop has ended; waits as long as the promises allow."""
    account = platform.account
    problems = [
        *what_stays(platform.orphans, "orphans", GONE_WITHIN_S),
        *what_stays(account.unfinished, "stuck runs", FREED_WITHIN_S),
        *what_stays(account.unfinished_steps, "stuck task runs", TASK_RUN_GRACE_S + FREED_WITHIN_S),
        *what_stays(account.leases, "leaked leases", FREED_WITHIN_S),
        *what_stays(account.slots, "leaked slots", FREED_WITHIN_S),
    ]
    once = dict.fromkeys(STAGES, 1)
    steps = account.steps(loop)
    ordered = {stage: steps.get(stage.replace("-", " ")) for stage in STAGES}
    for seen in (account.completions(loop), ordered):
        problems += [f"stages: {seen}"] * (seen != once)
    problems += [f"built twice: {account.repeated_builds()}"] * bool(account.repeated_builds())
    try:
        account.champion()
    except AssertionError as exc:
        problems.append(f"promotion half done: {exc}")
    return problems


def one_kill(platform: WholePlatform, victim: str, draw: random.Random, whole_s: float) -> str:
    """One loop, killed once; drawn again where it had ended before. Returns its problems."""
    while True:
        platform.renew_data()
        platform.until_well()
        loop, began = platform.start_loop(), time.monotonic()
        if victim not in IN_TRAINING:
            time.sleep(draw.uniform(0, whole_s))
        if struck(platform, victim, loop, draw):
            break
    after_s = time.monotonic() - began
    how = platform.bring_to_its_end(loop, LEFT_ALONE_S)
    problems = problems_of(platform, loop)
    told = f"{victim:<21} at {after_s:5.1f} s: completed {how}; {'; '.join(problems) or 'clean'}"
    sys.stdout.write(f"{told}\n")
    return told if problems else ""


@proves(Promise.INTERRUPT, "completed; no stage repeated, no orphan, no lease, no slot")
@proves(Promise.KILLED_WORKER, "no run is Running beyond a minute")
def test_a_loop_is_completed_whatever_is_killed_and_repeats_nothing(
    platform: WholePlatform,
) -> None:
    draw = random.Random(SEED)
    began = time.monotonic()
    loop = platform.start_loop()
    platform.bring_to_its_end(loop, LEFT_ALONE_S)
    whole_s = time.monotonic() - began
    assert not problems_of(platform, loop)
    deck: list[str] = []
    wrong = []
    for _ in range(KILLS):
        deck = deck or draw.sample(VICTIMS, len(VICTIMS))
        wrong.append(one_kill(platform, deck.pop(), draw, whole_s))
    assert not [told for told in wrong if told]
