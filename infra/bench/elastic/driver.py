"""The driver of an elastic run of the tiny worker, as a program: `driver RUN_DIRECTORY`.

Writes report.json, or error.txt; what the ranks print goes to ranks.log.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from infra.bench.elastic.worker import TinyJob
from tasks.kernel.errors import FalajError
from tasks.kernel.files import write_atomically
from tasks.training.elastic.driver import ElasticDriver
from tasks.training.elastic.process import ElasticSpec
from tasks.training.launch.rendezvous import CYCLE_VARIABLES

WORKER_MODULE = "infra.bench.elastic.worker"
VARIABLES = {"OMP_NUM_THREADS": "1", **CYCLE_VARIABLES}


def main(run_path: str) -> None:
    """Run the job that the run directory holds."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s")
    run = Path(run_path)
    job = TinyJob.model_validate_json((run / "job.json").read_text())
    with (run / "ranks.log").open("a", buffering=1) as log:

        def on_line(who: str, line: str) -> None:
            log.write(f"{who} | {line}\n")

        spec = ElasticSpec(WORKER_MODULE, run, VARIABLES)
        driver = ElasticDriver(spec, job.config, on_line, shortest_rest_s=1)
        try:
            with driver:
                driver.run(
                    lambda: write_atomically(run / "report.json", driver.report.model_dump_json())
                )
        except FalajError as exc:
            write_atomically(run / "error.txt", f"{type(exc).__name__}: {exc}")
            raise SystemExit(1) from exc
    write_atomically(run / "report.json", driver.report.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1])
