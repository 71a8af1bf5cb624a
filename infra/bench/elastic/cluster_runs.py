"""Elastic runs over the hosts of `hosts.Cluster`, with the driver on `h0`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.bench.elastic.hosts import DRIVER, INTERFACE, Cluster, pids_of
from infra.bench.elastic.runs import ElasticRun
from infra.bench.elastic.worker import TinyJob
from infra.bench.parts import wait_until
from tasks.training.elastic.config import ElasticConfig

LIMIT_S = 150


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

    def await_end(self) -> None:
        """Wait for the end of training."""
        wait_until(lambda: self.driver.poll() is not None, "the end of training", LIMIT_S)
        assert self.driver.returncode == 0, self.log


@contextmanager
def started(
    cluster: Cluster, folder: Path, num_hosts: int, settings: dict[str, object], **job: object
) -> Iterator[ClusterRun]:
    """Start a job on the first `num_hosts` hosts; what is left of it is ended with the context."""
    hosts_file = folder / "hosts"
    hosts_file.write_text("".join(f"{host}\n" for host in cluster.hosts[:num_hosts]))
    run = ElasticRun(folder / "run")
    run.prepare(TinyJob.model_validate({"config": config(cluster, hosts_file, settings), **job}))
    program = [sys.executable, "-m", "infra.bench.elastic.runs", str(run.path)]
    driver = cluster.start_on(DRIVER, program, run.path / "driver.log")
    try:
        yield ClusterRun(run, driver, hosts_file)
    finally:
        driver.terminate()
        driver.wait()


def config(cluster: Cluster, hosts_file: Path, settings: dict[str, object]) -> ElasticConfig:
    """One rank a host, found by file and probe."""
    return ElasticConfig.model_validate(
        {
            "enabled": True,
            "discovery": "ssh",
            "place": str(hosts_file),
            "slots_per_host": 1,
            "interface": INTERFACE,
            "ssh_key_file": cluster.key_file,
            "ssh_known_hosts_file": cluster.known_hosts_file,
            **settings,
        }
    )


def ranks_on(host: str, run: ElasticRun) -> list[int]:
    """Processes of a run on a host."""
    return [pid for pid in pids_of(host) if str(run.path) in command_of(pid)]


def command_of(pid: int) -> str:
    """The command line of a process; empty where it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def environment_of(pid: int) -> str:
    """The environment of a process; empty where it has just ended."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return ""
