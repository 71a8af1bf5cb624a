"""A small server with a serving process's admin interface: tracks, a token, its address file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "a-token-for-tests-alone"


@dataclass
class AdminServer:
    """What the server holds, and what it was asked.

    Attributes:
        versions: that it can load.
        hangs_s: a change of tracks is answered so late.
        is_down: each question is answered 503.
        is_empty: it has no version of any model yet.
    """

    tracks: dict[str, str | None] = field(
        default_factory=lambda: {"stable": "1", "candidate": None, "shadow": None}
    )
    versions: tuple[str, ...] = ("1", "2", "3")
    asked: list[dict[str, str | None]] = field(default_factory=list)
    hangs_s: float = 0.0
    is_down: bool = False
    is_empty: bool = False
    answers: Any = None

    def change(self, wanted: dict[str, str | None]) -> tuple[int, Any]:
        """Set tracks as a serving process does."""
        self.asked.append(wanted)
        time.sleep(self.hangs_s)
        unknown = [v for v in wanted.values() if v is not None and v not in self.versions]
        if unknown:
            return 404, {"error": f"no version {unknown[0]}"}
        self.tracks |= wanted
        return 200, self.state()

    def state(self) -> Any:
        """As `GET /admin/models/<model>` tells it."""
        if self.answers is not None:
            return self.answers
        return {"name": "flight-delay", "ready": True, "slots": self.tracks, "versions": []}


@contextmanager
def admin_server(home: Path) -> Iterator[AdminServer]:
    """A running server whose address and token lie in a state folder."""
    kept = AdminServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, kept.state())

        def do_POST(self) -> None:
            assert self.path == "/admin/models/flight-delay/slots"
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self._admits():
                self._say(*kept.change(body))

        def _answer(self, status: int, body: Any) -> None:
            assert self.path == "/admin/models/flight-delay"
            if self._admits():
                self._say(status, body)

        def _admits(self) -> bool:
            if self.headers["authorization"] != f"Bearer {TOKEN}":
                self._say(401, {"error": "the token is another one"})
                return False
            if kept.is_empty:
                self._say(404, {"error": "no model 'flight-delay'"})
                return False
            if kept.is_down:
                self._say(503, {"error": "version 2 is not as recorded"})
                return False
            return True

        def _say(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        secrets = home / "serving" / "secrets"
        secrets.mkdir(parents=True)
        (secrets / "admin-token").write_text(TOKEN + "\n")
        address = {"pid": 1, "admin": f"http://127.0.0.1:{server.server_address[1]}"}
        (home / "serving" / "server.json").write_text(json.dumps(address))
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()
