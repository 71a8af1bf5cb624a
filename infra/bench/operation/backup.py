"""What backups cost the loop beside which they run, one every ten seconds or so.

Loops on new state folders, with and without, in turns. Backups run in a session of their own, as a
timer starts them: where the kernel groups processes by session (`sched_autogroup_enabled`), their
niceness counts for nothing, and what they cost is what they need.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial

from infra.bench.figures import Measured, at_least, at_most, interleaved, median_ratio
from infra.bench.loop import run_measured
from infra.bench.parts import Bench
from infra.bench.processes import running
from infra.bench.running import own_environment, small_repository

BACKUPS, LOOPS = "with backups", "alone"
AGAIN_AND_AGAIN = ("bash", "-c", 'while :; do "$@"; sleep 10; done', "-")


def figures(bench: Bench) -> Measured:
    """Wall and CPU seconds of the loop with backups beside it to those of the loop alone."""
    log, made = bench.folder / "log.txt", list[int]()
    own = own_environment() | {"FALAJ_FEATURE_REPO": str(small_repository(bench.folder))}

    def run(what: str) -> tuple[float, float]:
        folder = bench.folder / f"{what}-{len(os.listdir(bench.folder))}"
        home, place = folder / "home", folder / "backups"
        home.mkdir(parents=True)
        falaj = [sys.executable, "-m", "falaj", "--home", str(home)]
        words = [*AGAIN_AND_AGAIN, *falaj, "backup", str(place)]
        beside = running(words, log, log.exists, own) if what == BACKUPS else nullcontext()
        with beside:  # its CPU does not count: backups are no ended children yet
            cost = run_measured([*falaj[1:], "run"], log, own)
        if what == BACKUPS:
            made.append(len([*place.glob("backups/*.json")]))
        return round(cost.wall_s, 1), round(cost.cpu_s, 1)

    turns = {what: partial(run, what) for what in (LOOPS, BACKUPS)}
    found = interleaved(turns, bench.size(5, 1))
    beside, alone = (zip(*found[what], strict=True) for what in (BACKUPS, LOOPS))
    wall, cpu = map(median_ratio, beside, alone)
    seen = f"seconds of wall and CPU: {found}"
    return [
        at_most("loop beside backups, wall", wall, 1.05, seen),
        at_most("loop beside backups, its CPU", cpu, 1.05, "the same loops"),
        at_least("backups in a loop", min(made), 1, "the fewest"),
    ]
