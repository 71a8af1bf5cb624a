"""Command line: `python -m infra.deploying`: pools, queues, blocks, deployments, automations.

Writes what differs from the files, leaves equal things alone, and reads all back.

Exit codes: 0 all is as the files say, 1 something differs or the server refused, 2 wrong
configuration or no server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra.orchestration.client import platform_environment
from tasks.kernel.errors import ConfigurationError, FalajError, TransientError
from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from infra.deploying.deploy import Plan
    from infra.deploying.items import Outcome

EXIT_DIFFERS, EXIT_WRONG_INPUT = 1, 2
NUM_ATTEMPTS = 3
"""With `--wait`: a server that is started anew meanwhile is waited for again."""


class NoAnswerError(TransientError):
    """The server was away; nothing is known of the last thing that was asked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Deploy, or check, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _use_platform()
        outcome = asyncio.run(_run(options))
    except ConfigurationError as exc:
        return _say(f"refused: {exc}", EXIT_WRONG_INPUT)
    except FalajError as exc:
        return _say(f"failed: {exc}", EXIT_DIFFERS)
    _tell(outcome, check=options.check)
    return EXIT_DIFFERS if outcome.differences else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infra.deploying",
        description="Make pools, queues, blocks, deployments and automations as the files say.",
    )
    parser.add_argument("--check", action="store_true", help="only compare; changes nothing")
    parser.add_argument(
        "--repo",
        action="append",
        default=[],
        metavar="PATH[=PATH_ON_WORKERS]",
        help="feature repository of a use case; the first has plain deployment names "
        "(default: FALAJ_FEATURE_REPOS, separated by colons, or the one of FALAJ_FEATURE_REPO)",
    )
    parser.add_argument(
        "--pools", choices=("process", "kubernetes"), default="process", help="kind of work pools"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0,
        metavar="SECONDS",
        help="for a server that is starting; the files are read meanwhile",
    )
    parser.add_argument("--file", type=Path, help="instead of prefect.yaml")
    parser.add_argument(
        "--resume", action="store_true", help="switch on again what people have paused"
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="remove deployments and automations of ours that the files no longer have",
    )
    return parser


def _use_platform() -> None:
    """Find the server, before Prefect is imported and reads the environment.

    Raises:
        ConfigurationError: no platform runs here, and no address is given.
    """
    if os.environ.get("PREFECT_API_URL"):
        return
    environment = platform_environment(Settings.from_environment().home)
    if environment is None:
        raise ConfigurationError(
            "no platform runs on this state folder and PREFECT_API_URL is not set; start one with "
            "`make up`, or name a server. Nothing was deployed"
        )
    os.environ.update(environment)


async def _run(options: argparse.Namespace) -> Outcome:
    from infra.deploying.deploy import make_plan
    from infra.deploying.file import PREFECT_FILE
    from infra.deploying.waiting import wait_for_server

    plan = make_plan(
        options.repo,
        file=options.file or PREFECT_FILE,
        pool_type=options.pools,
        resume=options.resume,
    )
    if not options.wait:
        return await _ask_server(plan, options)
    for _ in range(NUM_ATTEMPTS - 1):
        wait_for_server(options.wait)
        try:
            return await _ask_server(plan, options)
        except NoAnswerError as exc:
            _say(f"again, once it answers: {exc}", EXIT_DIFFERS)
    wait_for_server(options.wait)
    return await _ask_server(plan, options)


async def _ask_server(plan: Plan, options: argparse.Namespace) -> Outcome:
    """Compare, or write what differs; equal things are left alone, so it can be done again.

    Raises:
        NoAnswerError: the server was away.
        TransientError: the server refused.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    from infra.deploying.deploy import check, deploy

    try:
        async with get_client() as client:
            if options.check:
                return await check(client, plan)
            return await deploy(client, plan, prune=options.prune)
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


def _tell(outcome: Outcome, *, check: bool) -> None:
    for label in outcome.written:
        print(f"written    {label}")
    for difference in outcome.differences:
        print(f"differs    {difference}")
    for note in sorted(set(outcome.notes)):
        print(f"note       {note}")
    if outcome.differences and not check:
        print("the server did not take what was written; see above")
    print(
        f"{len(outcome.equal)} as the files say, {len(outcome.written)} written, "
        f"{len(outcome.differences)} differences"
    )


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(f"{sentence}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
