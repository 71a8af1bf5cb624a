"""What happens to hosts of a cluster now and then, done on purpose."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from infra.bench.elastic import hosts
from infra.bench.elastic.runs import started
from tests.support.host.processes import command_of
from tests.support.ranks.elastic import finish, lost_steps, ranks_on, report_of
from tests.support.suite.promises import Promise, proves

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(900),
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]
NUM_KILLS = 12
SEED = 20261121


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Cluster]:
    with hosts.cluster(tmp_path_factory.mktemp("cluster"), num_hosts=3) as built:
        yield built


@proves(Promise.EVICTION, "the other hosts go on, from the last commit")
def test_the_others_go_on_when_a_host_dies(cluster: hosts.Cluster, tmp_path: Path) -> None:
    with started(cluster, tmp_path, 3, {"gloo_timeout_s": 5}, num_steps=200, patient=True) as job:
        job.await_that(lambda: job.run.has_done(3, size=3), "three ranks train")
        cluster.kill_host("h3")
        try:
            job.await_that(lambda: job.run.has_done(3, size=2), "the others go on")
        finally:
            cluster.mend("h3")
            cluster.start_sshd("h3")
        job.await_that(lambda: job.run.has_done(3, size=3), "the host is back")
        finish(job)


@proves(Promise.EVICTION, "the removed host leaves, nothing is lost")
def test_a_host_that_is_added_takes_part_and_one_that_is_removed_leaves(
    cluster: hosts.Cluster, tmp_path: Path
) -> None:
    with started(cluster, tmp_path, 1, {}, num_steps=600, patient=True) as job:
        job.await_that(lambda: job.run.has_done(3, size=1), "one rank trains")
        job.hosts_file.write_text("h1\nh2\n")
        job.await_that(lambda: job.run.has_done(3, size=2), "the second has joined")
        job.hosts_file.write_text("h2\n")
        job.await_that(lambda: job.run.has_done(3, size=1), "the first has left")
        finish(job)
        report = report_of(job.run)
        assert [event.kind for event in report.events if event.kind in ("lost", "left")] == ["left"]
        assert lost_steps(job.run) == 0


@proves(Promise.INTERRUPT, "the weights of an undisturbed run")
def test_ranks_killed_at_random_moments_never_change_the_result(
    cluster: hosts.Cluster, tmp_path: Path
) -> None:
    """Never two at once: with all ranks their memory would be gone, which checkpoints are for."""
    drawn = random.Random(SEED)
    with started(cluster, tmp_path, 3, {}, num_steps=4000, patient=True) as job:
        for _ in range(NUM_KILLS):
            job.await_that(lambda: job.run.has_done(1, size=3), "three ranks train")
            number = job.run.steps[-1].number + drawn.randrange(20)
            job.await_that(lambda number=number: job.run.has_done(number), "some more steps")
            for pid in ranks_on(drawn.choice(cluster.hosts), job.run):
                if "guard.py" not in command_of(pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        job.await_that(lambda: job.run.has_done(1, size=3), "all are back")
        finish(job)
