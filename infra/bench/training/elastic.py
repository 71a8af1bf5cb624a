"""What a lost rank, a cut link and a joining host cost elastic training.

The two figures of several hosts are measured over network
namespaces, which need root; without them they are left out, with a line that says so.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from infra.bench.elastic import hosts, runs
from infra.bench.elastic.worker import TinyJob
from infra.bench.figures import LeftOut, Measured, at_most
from infra.bench.parts import Bench
from tasks.training.elastic.driver import ElasticDriver

# Some 250,000 parameters and two moments of each: as large as the tabular network.
WIDTH = 25_000
# Steps of the whole group before the next kill: so many that it has committed since.
SETTLED = 20
Change = Callable[[hosts.Cluster, runs.ClusterRun], None]
KillCost = tuple[float, float]
"""Seconds from a kill until the others had gone beyond where all were, without one step's time; and
how old the commit was that they went on from."""


def killed_ranks(folder: Path, num_kills: int, num_steps: int, width: int) -> list[KillCost]:
    """Kill a rank of a group of two again and again; its slot is used again each time."""
    run = runs.ElasticRun(folder / "run")
    kills: list[float] = []

    def kill(driver: ElasticDriver) -> None:
        since_kill = [step for step in run.steps if not kills or step.at_s > kills[-1]]
        newest = since_kill[-SETTLED:]
        full = len(newest) == SETTLED and all(step.size == 2 for step in newest)
        if full and len(kills) < num_kills:
            pid = runs.pid_of_rank(driver, len(kills) % 2)
            kills.append(time.time())
            os.kill(pid, signal.SIGKILL)
        elif full:
            run.go()

    config = runs.LOCAL.model_copy(update={"slots_per_host": 2})
    job = TinyJob(config=config, num_steps=num_steps, step_s=0.004, patient=True, width=width)
    runs.run_here(run, job, kill, 900)
    run.check_result()
    return [cost_of(kill_s, run.steps) for kill_s in kills]


def cost_of(kill_s: float, steps: list[runs.Step]) -> KillCost:
    """Compare the steps before and after a kill."""
    before = [step for step in steps if step.at_s <= kill_s]
    after = [step for step in steps if step.at_s > kill_s and step.size == 1]
    reached = max(step.number for step in before)
    beyond = next(step for step in after if step.number > reached)
    paces = [b.at_s - a.at_s for a, b in zip(before[-20:], before[-19:], strict=False)]
    committed = next(step for step in before if step.number == after[0].number - 1)
    return beyond.at_s - kill_s - statistics.median(paces), kill_s - committed.at_s


def changed_s(cluster: hosts.Cluster, folder: Path, num_hosts: int, change: Change) -> float:
    """Seconds from a change until the first step of two ranks, where others trained before."""
    with runs.started(cluster, folder, num_hosts, {}, num_steps=100_000) as job:
        job.await_that(lambda: job.run.has_done(20, size=num_hosts), "all ranks train")
        since_s = time.time()

        def found() -> list[runs.Step]:
            return [step for step in job.run.steps if step.at_s > since_s and step.size == 2]

        change(cluster, job)
        try:
            job.await_that(found, "a step of two ranks")
        finally:
            cluster.mend("h2")
        return found()[0].at_s - since_s


def cut_one(cluster: hosts.Cluster, job: runs.ClusterRun) -> None:
    """Cut one of three links; the other two go on."""
    cluster.cut("h2")


def add_one(cluster: hosts.Cluster, job: runs.ClusterRun) -> None:
    """Write a second host into the hosts file."""
    job.hosts_file.write_text("h1\nh2\n")


def figures(bench: Bench) -> Measured:
    """All figures of elastic training."""
    costs = killed_ranks(bench.folder, *bench.size((5, 1500, WIDTH), (1, 150, 100)))
    taken_s, redone_s = zip(*costs, strict=True)
    evidence = (
        f"median of {len(costs)} kills, two ranks; at most {max(redone_s):.1f} s of work done "
        "again, weights as undisturbed"
    )
    median_s = statistics.median(taken_s)
    measured: Measured = [at_most("a killed rank costs, s", median_s, 2.0, evidence)]
    if reason := hosts.why_not():
        return [*measured, *(LeftOut(name, reason) for name in OF_HOSTS)]
    with hosts.cluster(bench.folder, num_hosts=3) as cluster:
        for name, (bound, num_hosts, change) in OF_HOSTS.items():
            own = bench.folder / change.__name__
            own.mkdir()
            seconds = changed_s(cluster, own, num_hosts, change)
            measured.append(at_most(name, seconds, bound, "network namespaces, SSH"))
    return measured


OF_HOSTS: dict[str, tuple[float, int, Change]] = {
    "a cut link is noticed within, s": (30.0, 3, cut_one),
    "a joining host works within, s": (15.0, 1, add_one),
}
