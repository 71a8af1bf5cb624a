"""A small server with a serving process's admin interface: tracks, a token, its address file."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.contracts.serving import address_file, lock_file
from tasks.kernel.files import locked
from tests.support.services.listeners import Answer, Asked, http_listener, json_answer

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
def admin_server(home: Path, number: int = 0) -> Iterator[AdminServer]:
    """A running server whose address and token lie in a state folder."""
    kept = AdminServer()

    def answer(asked: Asked) -> Answer:
        if asked.headers["authorization"] != f"Bearer {TOKEN}":
            return json_answer({"error": "the token is another one"}, 401)
        if kept.is_empty:
            return json_answer({"error": "no model 'flight-delay'"}, 404)
        if kept.is_down:
            return json_answer({"error": "version 2 is not as recorded"}, 503)
        if asked.method == "GET":
            assert asked.path == "/admin/models/flight-delay"
            return json_answer(kept.state())
        assert asked.path == "/admin/models/flight-delay/slots"
        status, body = kept.change(json.loads(asked.body))
        return json_answer(body, status)

    lock = locked(lock_file(address_file(home, number)))
    with http_listener(answer) as url, lock:
        secrets = home / "serving" / "secrets"
        secrets.mkdir(parents=True, exist_ok=True)
        (secrets / "admin-token").write_text(TOKEN + "\n")
        address_file(home, number).write_text(json.dumps({"pid": 1, "admin": url}))
        yield kept
