"""Deploy: pools, queues, blocks, deployments and automations become as the files describe."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from falaj.context import EXIT_FAILED, Context, Here
from infra.orchestration.client import platform_environment
from tasks.kernel.errors import ConfigurationError, TransientError

if TYPE_CHECKING:
    from infra.deploying.deploy import Plan
    from infra.deploying.items import Outcome

NUM_ATTEMPTS = 3
"""With `--wait`: a server that restarts meanwhile is tried again."""


class NoAnswerError(TransientError):
    """The server was away; the state of the last request is unknown."""


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
    _use_platform(context)
    from infra.deploying.deploy import make_plan
    from infra.deploying.file import PREFECT_FILE

    plan = make_plan(context.repos, file=file or PREFECT_FILE, pool_type=pools, resume=resume)
    outcome = asyncio.run(_deploy(plan, wait, check=check, prune=prune))
    _print(outcome, check=check)
    return EXIT_FAILED if outcome.differences else 0


def _use_platform(context: Context) -> None:
    """Find the server, before Prefect is imported and reads the environment.

    Raises:
        ConfigurationError: no platform runs here, and no address is given.
    """
    if os.environ.get("PREFECT_API_URL"):
        return
    environment = platform_environment(context.home)
    if environment is None:
        raise ConfigurationError(
            "no platform runs on this state folder and PREFECT_API_URL is not set; start one with "
            "`make up`, or name a server. Nothing was deployed"
        )
    os.environ.update(environment)


async def _deploy(plan: Plan, wait_s: float, *, check: bool, prune: bool) -> Outcome:
    from infra.platform.api import wait_for_server

    for attempt in range(NUM_ATTEMPTS if wait_s else 1):
        if wait_s:
            wait_for_server(wait_s)
        try:
            return await _write(plan, check=check, prune=prune)
        except NoAnswerError as exc:
            if not wait_s or attempt == NUM_ATTEMPTS - 1:
                raise
            sys.stderr.write(f"again, once it answers: {exc}\n")
    raise AssertionError("unreachable")


async def _write(plan: Plan, *, check: bool, prune: bool) -> Outcome:
    """Compare, or write what differs; equal things are left alone, so it can be done again.

    Raises:
        NoAnswerError: the server was away.
        TransientError: the server refused.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    from infra.deploying.deploy import check as compare
    from infra.deploying.deploy import deploy as write

    try:
        async with get_client() as client:
            if check:
                return await compare(client, plan)
            return await write(client, plan, prune=prune)
    except PrefectHTTPStatusError as exc:
        raise TransientError(
            f"the server refused {exc.request.method} {exc.request.url.path} with "
            f"{exc.response.status_code}: {exc.response.text[:300]}. What was written before is "
            "kept; mend the cause and deploy again"
        ) from exc
    except (httpx.TransportError, RuntimeError) as exc:
        if isinstance(exc, RuntimeError) and "Failed to reach API" not in str(exc):
            raise
        raise NoAnswerError(
            f"the server at {os.environ['PREFECT_API_URL']} does not answer ({exc}); is it up? "
            "What was written before is kept; deploy again"
        ) from exc


def _print(outcome: Outcome, *, check: bool) -> None:
    columns = {
        "written": outcome.written,
        "differs": outcome.differences,
        "note": sorted(set(outcome.notes)),
    }
    for name, lines in columns.items():
        for line in lines:
            print(f"{name:<11}{line}")
    if outcome.differences and not check:
        print("the server did not take what was written; see above")
    print(
        f"{len(outcome.equal)} as the files say, {len(outcome.written)} written, "
        f"{len(outcome.differences)} differences"
    )
