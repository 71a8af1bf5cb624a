"""Runs whose processes were ended from outside: nobody but the platform can say so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from infra.platform.api import WORKER_LABEL, PrefectApi
from infra.platform.state import CutRun
from tasks.kernel.errors import ConfigurationError, TransientError

LOGGER = logging.getLogger(__name__)


def runs_of(api: PrefectApi, workers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Unfinished runs that these workers have taken.

    Args:
        api: the server.
        workers: name of the worker by pool.
    """
    names = set(workers.values())
    return [
        run
        for run in api.unfinished_runs(workers)
        if (run.get("labels") or {}).get(WORKER_LABEL) in names
    ]


def end_cut_off(api: PrefectApi, workers: Mapping[str, str], reason: str) -> list[CutRun]:
    """Write a final state for what these workers, of which no process lives, had taken.

    A run that was being cancelled is Cancelled, any other Crashed: whoever repairs or retries runs
    finds it at once, instead of after its heartbeats have been missing for long.

    Raises:
        TransientError: the server does not answer.
    """
    ended = []
    for run in _with_parts(api, runs_of(api, workers)):
        state = "CANCELLED" if run["state"]["type"] == "CANCELLING" else "CRASHED"
        try:
            api.end_run(run["id"], state, f"cut off: {reason}")
        except ConfigurationError as exc:  # deleted meanwhile
            LOGGER.warning("run %s: %s", run["name"], exc)
            continue
        LOGGER.warning("run %s was cut off (%s) and is %s now", run["name"], reason, state)
        ended.append(CutRun(id=run["id"], name=run["name"], state=state))
    return ended


def _with_parts(api: PrefectApi, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs, and what they have called in their own processes, which end with them."""
    found = list(runs)
    while runs and (runs := api.unfinished_parts(run["id"] for run in runs)):
        found += runs
    return found


def end_cut_off_if_possible(
    api: PrefectApi, workers: Mapping[str, str], reason: str
) -> list[CutRun]:
    """As `end_cut_off`; where the server does not answer, the next start does it."""
    try:
        return end_cut_off(api, workers, reason)
    except (TransientError, ConfigurationError) as exc:
        LOGGER.warning("runs that were cut off will be marked at the next start: %s", exc)
        return []
