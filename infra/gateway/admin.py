"""Envoy's administration, on a socket that only its owner can open."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.gateway.place import ADMIN_SOCKET
from tasks.kernel.errors import TransientError

TIMEOUT_S = 5.0


class Admin:
    """Asks the Envoy that runs in a folder."""

    def __init__(self, folder: Path, name: str = ADMIN_SOCKET) -> None:
        self._folder, self._name = folder, name

    def get(self, path: str) -> bytes:
        """An answer's body.

        Raises:
            TransientError: no Envoy answers there.
        """
        return self._ask("GET", path)

    def post(self, path: str) -> bytes:
        """Change something; the answer's body.

        Raises:
            TransientError: no Envoy answers there, or it would not.
        """
        return self._ask("POST", path)

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
        """What Envoy holds against configuration that it was given and did not take."""
        return sorted(set(_errors(json.loads(self.get("/config_dump")))))

    def _ask(self, method: str, path: str) -> bytes:
        connection = _Connection(self._folder, self._name)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise TransientError(f"no Envoy answers in {self._folder}: {exc}") from exc
        finally:
            connection.close()
        if answer.status not in (200, 503):
            raise TransientError(f"Envoy answered {answer.status} to {path}: {body[:200]!r}")
        return body


def _errors(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if "details" in value.get("error_state", {}):
            yield str(value["error_state"]["details"])
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _errors(item)


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket in a folder, whose path may be longer than the 108 bytes of an address."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._folder, self._name = folder, name

    def connect(self) -> None:
        descriptor = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{descriptor}/{self._name}")
        finally:
            os.close(descriptor)
