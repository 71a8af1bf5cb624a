"""`down`: let runs end, then end the platform; or end it at once and say what that cut off."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from infra.orchestration.client import is_running, read_password
from infra.platform.api import NotFoundError, PrefectApi
from infra.platform.config import COORDINATOR, Place, stored_config
from infra.platform.cut_off import runs_of
from infra.platform.state import (
    now,
    paused_pools,
    read_endpoint,
    read_state,
    remember_paused,
    supervisor_pid,
)
from tasks.kernel.errors import ConfigurationError, FalajError, TransientError

POLL_S = 1.0
EXIT_S = 10.0
"""Python takes a moment from the end of a supervisor's work to the end of its process."""
TELL_EVERY_S = 5.0
STOP_MARGIN_S = 60.0
"""Three groups of processes with their grace, and a margin."""


class NotDownError(FalajError):
    """The platform still runs; the text says why."""


def bring_down(place: Place, *, at_once: bool, limit_s: float | None = None) -> None:
    """End the platform; harmless where none runs.

    Pools stop handing out runs, the coordinators' first: what they wait for must still be able to
    start. When no run is left, or the limit is reached, all processes end, and the runs that this
    cuts off are marked.

    Args:
        place: the platform.
        at_once: wait for no run.
        limit_s: seconds to wait for runs; None: as configured.

    Raises:
        NotDownError: the server cannot be asked what runs, or processes do not end.
    """
    if not is_running(place.home):
        print(f"No platform runs on {place.home}.")
        return
    config = stored_config(place)
    if not at_once:
        _drain(place, config.drain_limit_s if limit_s is None else limit_s)
    _end(place, 3 * config.stop_grace_s + STOP_MARGIN_S)
    _tell_what_was_cut_off(place)


def _drain(place: Place, limit_s: float) -> None:
    endpoint = read_endpoint(place)
    if endpoint is None:
        print("The server has not answered yet, so no run of its workers can be running.")
        return
    api = PrefectApi(endpoint.api_url, read_password(place.folder))
    workers = own_workers(place)
    deadline = time.monotonic() + limit_s
    try:
        with _resumed_unless_drained(api, place):
            for group in ([COORDINATOR], [pool for pool in workers if pool != COORDINATOR]):
                _pause(api, place, group)
                _wait_for_runs(api, {p: n for p, n in workers.items() if p in group}, deadline)
    except TransientError as exc:
        raise NotDownError(
            f"it cannot be seen which runs are running: {exc}. Nothing was ended. To end all at "
            "once: make down DOWN_ARGS=--now"
        ) from exc


def own_workers(place: Place) -> dict[str, str]:
    """Name of the worker by pool, for the workers that the supervisor has."""
    state = read_state(place)
    prefix = "worker-"
    pools = (
        [s.name.removeprefix(prefix) for s in state.services if s.name.startswith(prefix)]
        if (state)
        else []
    )
    return {pool: place.worker_name(pool) for pool in pools}


@contextmanager
def _resumed_unless_drained(api: PrefectApi, place: Place) -> Iterator[None]:
    """Undo the pauses where waiting was interrupted: the platform then stays as it was."""
    try:
        yield
    except (KeyboardInterrupt, TransientError):
        _resume(api, place)
        raise


def resume_pools(api: PrefectApi, place: Place) -> None:
    """Let the pools hand out runs again that going down had paused; others stay as they are.

    Raises:
        TransientError: the server does not answer; those that are still paused stay noted.
    """
    for pool in paused_pools(place):
        with suppress(NotFoundError):  # deleted meanwhile
            api.pause_pool(pool, paused=False)
    place.paused.unlink(missing_ok=True)


def _resume(api: PrefectApi, place: Place) -> None:
    try:
        resume_pools(api, place)
    except TransientError as exc:
        raise NotDownError(
            f"the pools {', '.join(paused_pools(place))} are paused and cannot be resumed: {exc}. "
            "The platform runs on; make up resumes them"
        ) from exc


def _pause(api: PrefectApi, place: Place, pools: list[str]) -> None:
    handing_out = {str(pool["name"]) for pool in api.pools() if not pool["is_paused"]}
    for pool in sorted(handing_out.intersection(pools)):
        remember_paused(place, [*paused_pools(place), pool])
        try:
            api.pause_pool(pool, paused=True)
        except NotFoundError:  # deleted a moment ago
            continue


def _wait_for_runs(api: PrefectApi, workers: Mapping[str, str], deadline: float) -> None:
    told = 0.0
    while runs := runs_of(api, workers):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            print(
                f"Waiting up to {left:.0f} s more for {len(runs)} "
                f"run{'s' * (len(runs) > 1)}: {', '.join(map(_described, runs[:5]))}",
                flush=True,
            )
        time.sleep(POLL_S)


def _described(run: Mapping[str, Any]) -> str:
    seconds = float(run.get("estimated_run_time") or 0)
    return f"{run['name']} ({run['state']['name']}, {seconds:.0f} s so far)"


def _end(place: Place, limit_s: float) -> None:
    pid = supervisor_pid(place)
    if pid is None or not is_running(place.home):
        return
    os.kill(pid, signal.SIGTERM)
    try:
        if _gone(place, limit_s):
            _exited(pid)
            return
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(
            "interrupted; the platform goes down all the same: make status shows when it is"
        ) from exc
    print(f"The supervisor has not ended within {limit_s:.0f} s and is killed; guards end the rest")
    os.kill(pid, signal.SIGKILL)
    if not _gone(place, limit_s):
        raise NotDownError(f"process {pid} does not end even on SIGKILL; the kernel holds it")


def _exited(pid: int) -> None:
    """Wait a little for a supervisor that let go of its lock to be gone as a process too."""
    with suppress(psutil.Error):
        psutil.Process(pid).wait(EXIT_S)


def _gone(place: Place, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while is_running(place.home):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _tell_what_was_cut_off(place: Place) -> None:
    try:
        state = read_state(place)
    except ConfigurationError:
        state = None
    for run in state.cut_off if state else ():
        print(f"Cut off: run {run.name} ({run.id}) is {run.state.capitalize()} now")
    print(f"The platform on {place.home} is down since {now():%F %T} UTC; its state is kept.")
