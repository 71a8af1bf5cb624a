"""Elastic runs of the tiny worker, for benches, tests and drills.

As a program, `runs RUN_DIRECTORY`, it is their driver: it writes report.json or error.txt; what the
ranks print goes to ranks.log.
"""

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra.bench.elastic.hosts import DRIVER, INTERFACE, Cluster
from infra.bench.elastic.worker import TinyJob, unbroken
from infra.bench.parts import wait_until
from tasks.kernel.errors import FalajError
from tasks.kernel.files import write_atomically
from tasks.kernel.guard import descendants
from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.driver import ElasticDriver, ElasticReport
from tasks.training.elastic.process import ElasticSpec, MemberState
from tasks.training.launch.rendezvous import CYCLE_VARIABLES

LOCAL = ElasticConfig(enabled=True, slots_per_host=3, min_ranks=1)
LIMIT_S = 150


@dataclass(frozen=True)
class Step:
    """One step that a group did, as its rank 0 noted it."""

    at_s: float
    number: int
    size: int


@dataclass(frozen=True)
class ElasticRun:
    """A run directory of the tiny worker."""

    path: Path

    def prepare(self, job: TinyJob) -> None:
        """Make the run directory, with the job in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "job.json").write_text(job.model_dump_json())

    @property
    def job(self) -> TinyJob:
        """What the ranks are asked to do."""
        return TinyJob.model_validate_json((self.path / "job.json").read_text())

    @property
    def steps(self) -> list[Step]:
        """All steps so far, those that were done again too."""
        path = self.path / "steps.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0].splitlines()
        return [Step(*json.loads(line)) for line in whole]

    def has_done(self, number: int, size: int | None = None) -> bool:
        """True where the newest step is at least that one, in a group of that size."""
        newest = self.steps[-1:]
        return bool(newest) and newest[0].number >= number and size in (None, newest[0].size)

    def check_result(self) -> None:
        """The weights are those of a run that nothing disturbed."""
        job = self.job
        result = json.loads((self.path / "result.json").read_text())
        for got, expected in zip(result, unbroken(job.num_steps, job.width), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-4)

    def go(self) -> None:
        """Let a patient job hurry."""
        (self.path / "go").touch()


def pid_of_rank(driver: ElasticDriver, rank: int) -> int:
    """The process of a local rank that trains."""
    training = [m for m in driver.members if m.state is MemberState.IN_GROUP]
    return descendants(next(m for m in training if m.rank == rank).pid)[0]


def run_here(
    run: ElasticRun,
    job: TinyJob,
    on_look: Callable[[ElasticDriver], None] = lambda _: None,
    limit_s: float = LIMIT_S,
) -> ElasticReport:
    """Run a job to its end, with the driver in this process and thread.

    Raises:
        FalajError: as `ElasticDriver.run`.
    """
    run.prepare(job)
    deadline = time.monotonic() + limit_s
    with (run.path / "ranks.log").open("a", buffering=1) as log:

        def on_line(who: str, line: str) -> None:
            log.write(f"{who} | {line}\n")

        def look(driver: ElasticDriver) -> None:
            assert time.monotonic() < deadline, (run.path / "ranks.log").read_text()[-3000:]
            on_look(driver)

        variables = {"OMP_NUM_THREADS": "1", **CYCLE_VARIABLES}
        spec = ElasticSpec("infra.bench.elastic.worker", run.path, variables)
        with ElasticDriver(spec, job.config, on_line, 0.5) as driver:
            return driver.run(lambda: look(driver))


# Over several hosts, with the driver on `h0`.


@dataclass(frozen=True)
class ClusterRun:
    """A driver that runs on `h0`."""

    run: ElasticRun
    driver: subprocess.Popen[bytes]
    hosts_file: Path

    @property
    def log(self) -> str:
        """What the driver has logged, and the ranks printed."""
        ranks = self.run.path / "ranks.log"
        printed = ranks.read_text() if ranks.exists() else ""
        return (self.run.path / "driver.log").read_text() + printed

    def await_that(self, condition: Callable[[], object], what: str) -> None:
        """Poll until `condition` holds or the driver has ended."""
        wait_until(lambda: condition() or self.driver.poll() is not None, what, LIMIT_S)
        assert condition(), f"the driver has ended before: {what}\n{self.log}"


@contextmanager
def started(
    cluster: Cluster, folder: Path, num_hosts: int, settings: dict[str, object], **job: object
) -> Iterator[ClusterRun]:
    """Start a job on the first `num_hosts` hosts; what is left of it is ended with the context.

    One rank a host, found by file and probe.
    """
    hosts_file = folder / "hosts"
    hosts_file.write_text("".join(f"{host}\n" for host in cluster.hosts[:num_hosts]))
    config = {
        "enabled": True,
        "discovery": "ssh",
        "place": str(hosts_file),
        "slots_per_host": 1,
        "interface": INTERFACE,
        "ssh_key_file": cluster.key_file,
        "ssh_known_hosts_file": cluster.known_hosts_file,
        **settings,
    }
    run = ElasticRun(folder / "run")
    run.prepare(TinyJob.model_validate({"config": config, **job}))
    program = [sys.executable, "-m", "infra.bench.elastic.runs", str(run.path)]
    driver = cluster.start_on(DRIVER, program, run.path / "driver.log")
    try:
        yield ClusterRun(run, driver, hosts_file)
    finally:
        driver.terminate()
        driver.wait()


def main(run_path: str) -> None:
    """Run the job that the run directory holds."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s")
    run = ElasticRun(Path(run_path))

    def write(report: ElasticReport) -> None:
        write_atomically(run.path / "report.json", report.model_dump_json())

    try:
        write(run_here(run, run.job, lambda driver: write(driver.report), math.inf))
    except FalajError as exc:
        write_atomically(run.path / "error.txt", f"{type(exc).__name__}: {exc}")
        raise SystemExit(1) from exc


if __name__ == "__main__":
    main(sys.argv[1])
