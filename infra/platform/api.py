"""The few calls of Prefect's API that the platform makes, without importing Prefect.

Importing it takes seconds and a hundred megabytes; supervisor, `status` and `down` need neither.
"""

import base64
import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

import httpx

from infra.platform.config import COORDINATOR
from infra.platform.files import CutRun, now
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.process import attempts
from tasks.metadata.identity import EXPECTED

LOGGER = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
WAIT_POLL_S = 0.3
"""For callers that try again soon, and have something else to do."""

PAGE = 200
"""The server's own limit for one response."""

UNFINISHED = ("RUNNING", "PENDING", "CANCELLING")
URGENT = "urgent"
"""The queue of short runs, which start no stages."""
NO_SLOT = "AwaitingConcurrencySlot"
WORKER_LABEL = "prefect.worker.name"

Json = dict[str, Any]


class NotFoundError(ConfigurationError):
    """The server knows no such thing."""


class BusyError(TransientError):
    """The server asks to come again later."""


@dataclass(frozen=True)
class PrefectApi:
    """A Prefect server.

    Args:
        url: address that ends in `/api`.
        password: the line `user:password`, or None.
    """

    url: str
    password: str | None
    timeout_s: float = 30.0

    def version(self) -> str:
        """Version of the server; the first call that needs the password."""
        return str(self._call("GET", "/admin/version"))

    def can_write(self) -> bool:
        """True where the server answers, knows the password and can write to its database.

        Deletes a variable of a name that no variable can have: the server begins a transaction for
        it, which blocks where another one holds the lock of writers.
        """
        try:
            self._call_once("DELETE", "/variables/name/-", None)
        except (TransientError, ConfigurationError) as exc:
            return isinstance(exc, NotFoundError)
        return True

    def pools(self) -> list[Json]:
        """All work pools."""
        return list(self._call("POST", "/work_pools/filter", {"limit": PAGE}))

    def pool(self, name: str) -> tuple[Json, list[Json]]:
        """A work pool, and its queues."""
        path = f"/work_pools/{quote(name, safe='')}"
        return self._call("GET", path), self._all(f"{path}/queues/filter", {})

    def pause_pool(self, name: str, *, paused: bool) -> None:
        """Stop a pool from handing out runs, or let it again."""
        self._call("PATCH", f"/work_pools/{quote(name, safe='')}", {"is_paused": paused})

    def workers(self, pool: str) -> list[Json]:
        """Workers of a pool that the server has heard of, with `name` and `status`."""
        path = f"/work_pools/{quote(pool, safe='')}/workers/filter"
        return list(self._call("POST", path, {"limit": PAGE}))

    def expected_state(self, pool: str) -> str | None:
        """Identity of the state that runs of a pool work on; None where none is deployed to it.

        A person's own deployments there name none.
        """
        query: Json = {"work_pools": {"name": {"any_": [pool]}}}
        found = self._all("/deployments/filter", query)
        named = (one["job_variables"].get("env", {}).get(EXPECTED) for one in found)
        return next((str(identity) for identity in named if identity), None)

    def planned_runs(self, after: str) -> list[Json]:
        """Runs that the scheduler has made for later than `after` (ISO, zone), the next first."""
        runs = self.runs(["SCHEDULED"], expected_start_time={"after_": after})
        runs.sort(key=lambda run: str(run["expected_start_time"]))
        return [run for run in runs if run.get("auto_scheduled")]

    def runs(
        self, states: Iterable[str], pools: Iterable[str] | None = None, **filters: object
    ) -> list[Json]:
        """All flow runs in these states, of these pools, that Prefect's filters let through."""
        wanted = {"state": {"type": {"any_": [*states]}}, **filters}
        query: Json = {"flow_runs": wanted, "sort": "START_TIME_ASC"}
        if pools is not None:
            query["work_pools"] = {"name": {"any_": sorted(pools)}}
        return self._all("/flow_runs/filter", query)

    def states(self, run_id: str) -> list[Json]:
        """All states that a flow run has been in."""
        return list(self._call("GET", f"/flow_run_states/?flow_run_id={run_id}"))

    def forget_planned(self, after: str) -> int:
        """Remove all runs that the scheduler has made for later than `after`; returns how many.

        Runs that a person has planned for a time are left.
        """
        planned = self.planned_runs(after)
        for run in planned:
            with suppress(NotFoundError):  # somebody else has removed it
                self._call("DELETE", f"/flow_runs/{run['id']}")
        return len(planned)

    def scheduled_deployments(self) -> list[str]:
        """Names of the deployments with an active schedule that are not paused."""
        return [
            str(deployment["name"])
            for deployment in self._call("POST", "/deployments/filter", {"limit": PAGE})
            if not deployment["paused"] and any(s["active"] for s in deployment["schedules"])
        ]

    def end_run(self, run_id: str, state: str, message: str) -> None:
        """Write a final state that nobody else will write any more."""
        final = {"type": state, "name": state.capitalize(), "message": message}
        self._call("POST", f"/flow_runs/{run_id}/set_state", {"state": final, "force": True})

    def _all(self, path: str, query: Json) -> list[Json]:
        found: list[Json] = []
        while True:
            page = self._call("POST", path, {**query, "limit": PAGE, "offset": len(found)})
            found += page
            if len(page) < PAGE:
                return found

    def _call(self, method: str, path: str, body: object = None) -> Any:
        """Send, and send again where the server is busy: SQLite has one writer at a time.

        Every call may be repeated: none adds anything.
        """
        for delay_s in (0.3, 1.0, 2.0, 4.0):
            try:
                return self._call_once(method, path, body)
            except BusyError:
                time.sleep(delay_s)
        return self._call_once(method, path, body)

    def _call_once(self, method: str, path: str, body: object) -> Any:
        url, headers = self.url + path, basic_auth(self.password)
        try:
            reply = http_client().request(
                method, url, json=body, headers=headers, timeout=self.timeout_s
            )
        except httpx.HTTPError as exc:
            raise TransientError(f"{self.url} does not answer: {exc}") from exc
        if reply.is_success:
            return reply.json() if reply.content else None
        if reply.status_code == 401:
            raise ConfigurationError(
                f"{self.url} asks for another password than the one kept here. The server was "
                "started with an earlier one, or is another platform's: make down, make up"
            )
        if reply.status_code == 404:
            raise NotFoundError(f"{url} is unknown to the server")
        kind = BusyError if reply.status_code in (429, 502, 503) else TransientError
        raise kind(f"{method} {url} was answered {reply.status_code}: {reply.text[:500]}")


@cache
def http_client() -> httpx.Client:
    """Of servers on this machine and beside it; a proxy of the environment is not asked."""
    verify = ssl.create_default_context()  # as the machine and SSL_CERT_FILE have it
    verify.minimum_version = ssl.TLSVersion.TLSv1_3
    return httpx.Client(trust_env=False, verify=verify, follow_redirects=True)


def basic_auth(password: str | None) -> dict[str, str]:
    """The header that carries `user:password`; none without a password."""
    if not password:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(password.encode()).decode()}


def answers(url: str, password: str | None = None) -> bool:
    """True where a GET of this address is answered with 200."""
    try:
        reply = http_client().get(url, headers=basic_auth(password), timeout=PROBE_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200


def wait_for_server(limit_s: float) -> None:
    """Return once the server of `PREFECT_API_URL` answers with the password of the environment.

    Raises:
        TransientError: it has not within `limit_s` seconds.
    """
    url, password = os.environ["PREFECT_API_URL"], os.environ.get("PREFECT_API_AUTH_STRING")
    version = f"{url}/admin/version"
    if not any(answers(version, password) for _ in attempts(limit_s, WAIT_POLL_S)):
        raise TransientError(
            f"the server at {url} has not answered for {limit_s:.0f} s; is it up, and is the "
            "password the right one? Nothing was deployed; deploy again"
        )


def runs_of(api: PrefectApi, workers: Mapping[str, str]) -> list[Json]:
    """Unfinished runs that these workers have taken.

    Args:
        api: the server.
        workers: name of the worker by pool.
    """
    names = set(workers.values())
    runs = api.runs(UNFINISHED, workers)
    return [run for run in runs if (run.get("labels") or {}).get(WORKER_LABEL) in names]


def num_running_loops(api: PrefectApi) -> int:
    """Running coordinators that hand out stages; what runs in the queue `urgent` does not.

    Raises:
        TransientError: the server does not answer.
    """
    running = api.runs(["RUNNING"], [COORDINATOR])
    return sum(run["work_queue_name"] != URGENT for run in running)


def demand(api: PrefectApi, pool: str) -> tuple[int, int]:
    """Runs of a pool that a worker would be given now, and those in progress.

    Held on purpose, and not given: those of a paused pool or queue, those beyond a limit, and
    those that wait for another run of their deployment.

    Raises:
        ConfigurationError: there is no such pool.
        TransientError: the server does not answer.
    """
    due = api.runs(["SCHEDULED"], [pool], expected_start_time={"before_": now().isoformat()})
    active = api.runs(UNFINISHED, [pool])
    if not due:
        return 0, len(active)
    at_work = {run["deployment_id"] for run in active}
    waiting = [r for r in due if r["state_name"] != NO_SLOT or r["deployment_id"] not in at_work]
    described, queues = api.pool(pool)
    by_queue = [Counter(run["work_queue_name"] for run in runs) for runs in (waiting, active)]
    given = sum(_within(queue, *(n[queue["name"]] for n in by_queue)) for queue in queues)
    return _within(described, given, len(active)), len(active)


def _within(place: Json, due: int, active: int) -> int:
    """How many runs a pool or queue gives away of those that are due."""
    limit = due + active if place["concurrency_limit"] is None else place["concurrency_limit"]
    return 0 if place["is_paused"] else max(0, min(due, limit - active))


def end_cut_off(api: PrefectApi, workers: Mapping[str, str], reason: str) -> list[CutRun]:
    """Write a final state for what these workers, of which no process lives, had taken.

    The runs that they have called in their own processes end with them. A run that was being
    cancelled is Cancelled, any other Crashed: recovery finds it at once, instead of after its
    heartbeats have been missing for long.

    Raises:
        TransientError: the server does not answer.
    """
    found = runs = runs_of(api, workers)
    while runs:
        callers = {"any_": sorted(run["id"] for run in runs)}
        runs = api.runs(UNFINISHED, parent_flow_run_id=callers, deployment_id={"is_null_": True})
        found = found + runs
    ended = []
    for run in found:
        state = "CANCELLED" if run["state"]["type"] == "CANCELLING" else "CRASHED"
        try:
            api.end_run(run["id"], state, f"cut off: {reason}")
        except ConfigurationError as exc:  # deleted meanwhile
            LOGGER.warning("run %s: %s", run["name"], exc)
            continue
        LOGGER.warning("run %s was cut off (%s) and is %s now", run["name"], reason, state)
        ended.append(CutRun(id=run["id"], name=run["name"], state=state))
    return ended
