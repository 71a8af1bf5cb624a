"""MLflow's own application and the run reports behind the platform's password, in one process.

Without a password every user of the machine could move the champion, although the files belong to
one: MLflow listens on a port, and loopback is open to all. MLflow's own accounts need a further
database and a secret key; here one password opens both UIs.
"""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path
from typing import Any

from infra.platform.api import basic_auth

PASSWORD_VARIABLE = "FALAJ_MLFLOW_PASSWORD"
HOME_VARIABLE = "FALAJ_REPORTS_HOME"
REPORTS_PATH = re.compile(r"/((?:use_cases/[a-z][a-z0-9-]*/)?reports)/")
"""Folders of reports lie under the state folder as their addresses do: one for each use case."""
OPEN_PATHS = frozenset({"/health", "/version"})


class PasswordGate:
    """Lets a request pass that carries the password (HTTP Basic); browsers ask for it.

    Args:
        app: the ASGI application behind it.
        password: the line `user:password`.
    """

    def __init__(self, app: Any, password: str) -> None:
        self._app = app
        self._expected = basic_auth(password)["Authorization"].removeprefix("Basic ").encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on, or refuse with 401; a web socket is closed."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"www-authenticate", b'Basic realm="MLflow", charset="UTF-8"'),
                (b"content-type", b"text/plain"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"User and password, please.\n"})

    def _may_pass(self, scope: Any) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return True
        kind, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"basic" and hmac.compare_digest(given.strip(), self._expected)


class WithReports:
    """Shows the run reports under paths of their own: a browser opens no file from a page.

    Args:
        app: the ASGI application that all other requests go to.
        home: the state folder; reports may come into being later.
    """

    def __init__(self, app: Any, home: Path) -> None:
        self._app, self._home = app, home

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with a file of a report, or pass on."""
        from starlette.exceptions import HTTPException
        from starlette.responses import PlainTextResponse
        from starlette.staticfiles import StaticFiles

        found = REPORTS_PATH.match(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        # `latest` is a link to the newest.
        folder = StaticFiles(directory=self._home / found[1], check_dir=False, follow_symlink=True)
        try:
            await folder({**scope, "root_path": f"/{found[1]}"}, receive, send)
        except HTTPException as exc:
            answer = PlainTextResponse(f"{scope['path']}: {exc.detail}\n", exc.status_code)
            await answer(scope, receive, send)


def create_app() -> Any:
    """MLflow's application; the password, if any, is taken out of the environment."""
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    from mlflow.server.fastapi_app import app as mlflows_own

    app = WithReports(mlflows_own, Path(os.environ[HOME_VARIABLE]))
    return PasswordGate(app, password) if password else app
