"""A worker of a work pool that starts no run that nobody signed.

`python -m infra.orchestration.worker process --pool cpu`; all else is `prefect worker start`.

`falaj deploy` signs what it deployed, in the state; who writes Prefect's database does not write
there. So what the database says of a run is held to the signatures before anything is started. In
the run's own process that would be too late: its command and environment are said there as well.
"""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.governance import signing
from tasks.kernel.errors import SignatureError
from tasks.kernel.keys.choice import TRUSTED
from tasks.kernel.settings import Settings

DECIDING = (
    "entrypoint path pull_steps parameters parameter_openapi_schema job_variables "
    "work_pool_name base_job_template"
).split()
"""Fields of a deployment or pool that say what is run. The others say when, and who is told."""


def digest(value: object) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digests(fields: Mapping[str, Any]) -> dict[str, str]:
    """Of each deciding field of a deployment or pool; none is as good as an empty one."""
    return {name: digest(fields.get(name) or None) for name in DECIDING}


def check_run(home: Path, run: Any, deployment: Any, flow: Any, pool: Any) -> bool:
    """See that a run is of a deployment and pool as `falaj deploy` left them.

    Args:
        home: the state folder.
        run: of Prefect, and so are the others as Prefect's API gives them.
        deployment: None where the run is of none.
        flow: of the run.
        pool: that gives the run out.

    Returns:
        False where nothing is signed: nobody ever deployed this pool by `falaj deploy`, and
        `FALAJ_TRUSTED_KEYS` is not set.

    Raises:
        SignatureError: somebody else made or changed one of them; what, it says.
    """
    of_pool = f"deployments/work pool {pool.name}"
    if not os.environ.get(TRUSTED) and signing.read(signing.record_path(home, of_pool)) is None:
        return False
    if deployment is None or run.job_variables:
        own = f"brings {', '.join(run.job_variables or ())} of its own" if deployment else ""
        unsigned = SignatureError(
            f"the run {run.name} {own or 'is of no deployment'}, which nobody signed. It was not "
            "started; start one of a deployment, without job variables"
        )
        signing.refused(home, of_pool, unsigned)
        raise unsigned
    named = f"deployments/deployment {flow.name}/{deployment.name}"
    for subject, fields in ((of_pool, dict(pool)), (named, dict(deployment))):
        signing.check(home, subject, digests(fields), signing.record_path(home, subject))
    return True


def register(kind: str) -> None:
    """Put a worker that checks in the place of Prefect's own of this kind, in this process."""
    from prefect.workers.base import BaseWorker

    found: Any = BaseWorker.get_worker_class_from_type(kind)
    home = Settings.from_environment().home

    class Configuration(found.job_configuration):
        def prepare_for_flow_run(self, **told: Any) -> None:
            of = map(told.get, ("flow_run", "deployment", "flow", "work_pool"))
            is_signed = check_run(home, *of)
            super().prepare_for_flow_run(**told)
            if is_signed and isinstance(self.env, dict):  # else its process would ask once more
                self.env["PREFECT__FLOW_ENTRYPOINT"] = told["deployment"].entrypoint

    with warnings.catch_warnings(action="ignore"):  # that it takes the place is meant

        class Worker(found):
            job_configuration = Configuration


if __name__ == "__main__":
    from prefect.cli import app

    if not sys.argv[1:]:
        sys.exit("name the kind of worker, as in: python -m infra.orchestration.worker process")
    register(sys.argv[1])
    sys.argv = ["prefect", "worker", "start", "--type", *sys.argv[1:]]
    app()
