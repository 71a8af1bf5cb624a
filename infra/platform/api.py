"""The few calls of Prefect's API that the platform makes, without importing Prefect.

Importing it takes seconds and a hundred megabytes; supervisor, `status` and `down` need neither.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from tasks.kernel.errors import ConfigurationError, TransientError

TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0
"""For whoever asks again soon, and has something else to do."""

PAGE = 200
"""The server's own limit for one answer."""

UNFINISHED = ("RUNNING", "PENDING", "CANCELLING")
WORKER_LABEL = "prefect.worker.name"
BUSY_CODES = (429, 502, 503)
BUSY_DELAYS_S = (0.3, 1.0, 2.0, 4.0)
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NotFoundError(ConfigurationError):
    """The server knows no such thing."""


class BusyError(TransientError):
    """The server asks to come again later."""


class PasswordError(ConfigurationError):
    """The server asks for another password."""


@dataclass(frozen=True)
class PrefectApi:
    """A Prefect server.

    Args:
        url: address that ends in `/api`.
        password: the line `user:password`, or None.
    """

    url: str
    password: str | None
    timeout_s: float = TIMEOUT_S

    def version(self) -> str:
        """Version of the server; the first call that needs the password."""
        return str(self._call("GET", "/admin/version"))

    def can_write(self) -> bool:
        """True where the server answers, knows the password and can write to its database.

        Deletes a variable of a name that no variable can have: the server begins a transaction for
        it, which waits where another one holds the lock of writers.
        """
        try:
            self._call_once("DELETE", "/variables/name/-", None)
        except NotFoundError:
            return True
        except (TransientError, ConfigurationError):
            return False
        return True

    def settings(self) -> dict[str, Any]:
        """The server's settings, its secrets left out."""
        return dict(self._call("GET", "/admin/settings"))

    def pools(self) -> list[dict[str, Any]]:
        """All work pools."""
        return list(self._call("POST", "/work_pools/filter", {"limit": PAGE}))

    def pause_pool(self, name: str, *, paused: bool) -> None:
        """Stop a pool from handing out runs, or let it again."""
        self._call("PATCH", f"/work_pools/{quote(name, safe='')}", {"is_paused": paused})

    def workers(self, pool: str) -> list[dict[str, Any]]:
        """Workers of a pool that the server has heard of, with `name` and `status`."""
        path = f"/work_pools/{quote(pool, safe='')}/workers/filter"
        return list(self._call("POST", path, {"limit": PAGE}))

    def unfinished_runs(
        self, pools: Iterable[str], states: tuple[str, ...] = UNFINISHED
    ) -> list[dict[str, Any]]:
        """Flow runs of these pools that have a process, or should have."""
        return self._runs(
            {"state": {"type": {"any_": list(states)}}},
            work_pools={"name": {"any_": sorted(pools)}},
        )

    def unfinished_parts(self, runs: Iterable[str]) -> list[dict[str, Any]]:
        """Flow runs that these runs have called in their own process."""
        return self._runs(
            {
                "state": {"type": {"any_": list(UNFINISHED)}},
                "parent_flow_run_id": {"any_": sorted(runs)},
                "deployment_id": {"is_null_": True},
            }
        )

    def waiting_runs(self, pools: Iterable[str], due_before: str) -> list[dict[str, Any]]:
        """Flow runs that no worker of these pools has taken, though they were due (ISO, zone)."""
        return self._runs(
            {
                "state": {"type": {"any_": ["SCHEDULED"]}},
                "expected_start_time": {"before_": due_before},
            },
            work_pools={"name": {"any_": sorted(pools)}},
        )

    def crashed_runs(self, after: str) -> list[dict[str, Any]]:
        """Deployed flow runs, called by no other, that crashed since then (ISO, with zone)."""
        return self._runs(
            {
                "state": {"type": {"any_": ["CRASHED"]}},
                "end_time": {"after_": after},
                "deployment_id": {"is_null_": False},
                "parent_task_run_id": {"is_null_": True},
            }
        )

    def _runs(self, flow_runs: Mapping[str, Any], **more: Any) -> list[dict[str, Any]]:
        """All flow runs that a filter lets through, page by page."""
        found: list[dict[str, Any]] = []
        query = {"flow_runs": flow_runs, **more, "sort": "START_TIME_ASC", "limit": PAGE}
        while True:
            page = self._call("POST", "/flow_runs/filter", {**query, "offset": len(found)})
            found += page
            if len(page) < PAGE:
                return found

    def next_scheduled(self, after: str) -> dict[str, Any] | None:
        """The next run that the scheduler has made for later than `after` (ISO, with zone)."""
        runs = self._scheduled(after)
        return next((run for run in runs if run.get("auto_scheduled")), None)

    def forget_planned(self, after: str) -> int:
        """Remove all runs that the scheduler has made for later than `after`; returns how many."""
        removed, kept = 0, 0
        while page := self._scheduled(after, offset=kept):
            for run in page:
                if run.get("auto_scheduled"):
                    self._delete_run(str(run["id"]))
                    removed += 1
                else:
                    kept += 1
        return removed

    def _delete_run(self, run_id: str) -> None:
        try:
            self._call("DELETE", f"/flow_runs/{run_id}")
        except NotFoundError:
            return  # somebody else has removed it

    def _scheduled(self, after: str, offset: int = 0) -> list[dict[str, Any]]:
        query = {
            "flow_runs": {
                "state": {"type": {"any_": ["SCHEDULED"]}},
                "expected_start_time": {"after_": after},
            },
            "sort": "EXPECTED_START_TIME_ASC",
            "limit": PAGE,
            "offset": offset,
        }
        return list(self._call("POST", "/flow_runs/filter", query))

    def scheduled_deployments(self) -> list[str]:
        """Names of the deployments with an active schedule that are not paused."""
        return [
            str(deployment["name"])
            for deployment in self._call("POST", "/deployments/filter", {"limit": PAGE})
            if not deployment["paused"] and any(s["active"] for s in deployment["schedules"])
        ]

    def end_run(self, run_id: str, state: str, message: str) -> None:
        """Write a final state that nobody else will write any more."""
        body = {
            "state": {"type": state, "name": state.capitalize(), "message": message},
            "force": True,
        }
        self._call("POST", f"/flow_runs/{run_id}/set_state", body)

    def _call(self, method: str, path: str, body: object = None) -> Any:
        """Ask, and ask again where the server is busy: SQLite has one writer at a time.

        Every call may be repeated: none adds anything.
        """
        for delay_s in BUSY_DELAYS_S:
            try:
                return self._call_once(method, path, body)
            except BusyError:
                time.sleep(delay_s)
        return self._call_once(method, path, body)

    def _call_once(self, method: str, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **basic_auth(self.password)},
        )
        try:
            with NO_PROXY.open(request, timeout=self.timeout_s) as reply:
                content = reply.read()
        except urllib.error.HTTPError as exc:
            raise self._refusal(exc, method, path) from exc
        except (OSError, HTTPException) as exc:  # the latter: it died while it answered
            reason = getattr(exc, "reason", exc)
            raise TransientError(f"{self.url} does not answer: {reason}") from exc
        return json.loads(content) if content else None

    def _refusal(self, error: urllib.error.HTTPError, method: str, path: str) -> Exception:
        if error.code == 401:
            return PasswordError(
                f"{self.url} asks for another password than the one kept here. The server was "
                "started with an earlier one, or is another platform's: make down, make up"
            )
        if error.code == 404:
            return NotFoundError(f"{self.url}{path} is unknown to the server")
        said = error.read(500).decode(errors="replace")
        kind = BusyError if error.code in BUSY_CODES else TransientError
        return kind(f"{method} {self.url}{path} was answered {error.code}: {said}")


def basic_auth(password: str | None) -> dict[str, str]:
    """The header that carries `user:password`; none without a password."""
    if not password:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(password.encode()).decode()}


def answers(url: str, password: str | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """True where a GET of this address is answered with 200."""
    request = urllib.request.Request(url, headers=basic_auth(password))
    try:
        with NO_PROXY.open(request, timeout=timeout_s) as reply:
            return bool(reply.status == 200)
    except (OSError, HTTPException):
        return False


def online_workers(api: PrefectApi, pool: str) -> set[str]:
    """Names of the workers of a pool that have spoken lately; none where there is no such pool."""
    try:
        return {str(w["name"]) for w in api.workers(pool) if w["status"] == "ONLINE"}
    except NotFoundError:
        return set()
