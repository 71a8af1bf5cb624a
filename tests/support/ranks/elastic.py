"""What tests ask of elastic runs of the tiny worker."""

from itertools import pairwise

from infra.bench.elastic.hosts import namespace, pids_in
from infra.bench.elastic.runs import LIMIT_S, ClusterRun, ElasticRun
from tasks.training.elastic.driver import ElasticReport
from tests.support.host.processes import command_of, wait_until

REMOTE = {
    "discovery": "ssh",
    "place": "/shared/hosts",
    "interface": "eth0",
    "ssh_key_file": "/keys/id",
    "ssh_known_hosts_file": "/keys/known_hosts",
}
"""Hosts that are reached by SSH, as far as a configuration has to say."""


def report_of(run: ElasticRun) -> ElasticReport:
    """What a driver that is a program of its own has written."""
    return ElasticReport.model_validate_json((run.path / "report.json").read_text())


def finish(job: ClusterRun) -> None:
    """Let a patient job hurry to its end; its weights are those of an undisturbed run."""
    job.run.go()
    wait_until(lambda: job.driver.poll() is not None, "the end of training", LIMIT_S)
    assert job.driver.returncode == 0, job.log
    job.run.check_result()


def lost_steps(run: ElasticRun) -> int:
    """The most steps that were done again at once."""
    numbers = [step.number for step in run.steps]
    return max((before - after + 1 for before, after in pairwise(numbers)), default=0)


def ranks_on(host: str, run: ElasticRun) -> list[int]:
    """Processes of a run on a host."""
    return [pid for pid in pids_in(namespace(host)) if str(run.path) in command_of(pid)]
