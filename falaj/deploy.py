"""Deploy: pools, queues, blocks, deployments and automations become as the files describe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from falaj.context import EXIT_FAILED, Here
from infra.orchestration.client import platform_environment
from tasks.kernel.errors import ConfigurationError


def deploy(
    *,
    check: bool = False,
    pools: Literal["process", "kubernetes"] = "process",
    wait: float = 0,
    file: Path | None = None,
    resume: bool = False,
    prune: bool = False,
    context: Here,
) -> int:
    """Write what differs from the files, leave equal things alone, and read all back.

    The use cases are those of --repo, which may be repeated as PATH[=PATH_ON_WORKERS]; the first
    has plain deployment names. Without it: FALAJ_FEATURE_REPOS, separated by colons, or the one of
    FALAJ_FEATURE_REPO. Exit code 1 where something differs.

    Args:
        check: Only compare; changes nothing.
        pools: Kind of work pools.
        wait: Seconds, for a server that is starting; the files are read meanwhile.
        file: Instead of prefect.yaml.
        resume: Switch on again what people have paused.
        prune: Remove deployments and automations of ours that the files no longer have.
    """
    if not os.environ.get("PREFECT_API_URL"):  # Prefect reads it when it is imported
        environment = platform_environment(context.home)
        if environment is None:
            raise ConfigurationError(
                "no platform runs on this state folder and PREFECT_API_URL is not set; start one "
                "with `make up`, or name a server. Nothing was deployed"
            )
        os.environ.update(environment)
    from infra.deploying.deploy import make_plan, run
    from infra.deploying.file import PREFECT_FILE

    plan = make_plan(context.repos, file=file or PREFECT_FILE, pool_type=pools, resume=resume)
    outcome = run(plan, wait, only_check=check, prune=prune)
    columns = {
        "written": outcome.written,
        "differs": outcome.differences,
        "note": sorted(set(outcome.notes)),
    }
    for name, lines in columns.items():
        for line in lines:
            print(f"{name:<11}{line}")
    print(
        f"{len(outcome.equal)} as the files say, {len(outcome.written)} written, "
        f"{len(outcome.differences)} differences"
    )
    return EXIT_FAILED if outcome.differences else 0
