"""The driver of an elastic run of the tiny worker; also a program: `driver RUN_DIRECTORY`.

As a program it writes report.json, or error.txt; what the ranks print goes to ranks.log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from infra.bench.elastic.worker import TinyJob
from tasks.kernel.errors import FalajError
from tasks.kernel.files import write_atomically
from tasks.training.elastic.driver import ElasticDriver
from tasks.training.elastic.process import ElasticSpec
from tasks.training.elastic.report import ElasticReport
from tasks.training.launch.rendezvous import CYCLE_VARIABLES

WORKER_MODULE = "infra.bench.elastic.worker"
SHORTEST_REST_S = 0.5


def drive(run: Path, job: TinyJob, on_look: Callable[[ElasticDriver], None]) -> ElasticReport:
    """Run a job to its end, in this thread.

    Raises:
        FalajError: as `ElasticDriver.run`.
    """
    with (run / "ranks.log").open("a", buffering=1) as log:

        def on_line(who: str, line: str) -> None:
            log.write(f"{who} | {line}\n")

        spec = ElasticSpec(WORKER_MODULE, run, {"OMP_NUM_THREADS": "1", **CYCLE_VARIABLES})
        with ElasticDriver(spec, job.config, on_line, SHORTEST_REST_S) as driver:
            return driver.run(lambda: on_look(driver))


def main(run_path: str) -> None:
    """Run the job that the run directory holds."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s")
    run = Path(run_path)
    job = TinyJob.model_validate_json((run / "job.json").read_text())

    def write(report: ElasticReport) -> None:
        write_atomically(run / "report.json", report.model_dump_json())

    try:
        write(drive(run, job, lambda driver: write(driver.report)))
    except FalajError as exc:
        write_atomically(run / "error.txt", f"{type(exc).__name__}: {exc}")
        raise SystemExit(1) from exc


if __name__ == "__main__":
    main(sys.argv[1])
