"""MLflow's own application and the run reports behind the platform's password, in one process.

Without a password every user of the machine could move the champion, although the files belong to
one: MLflow listens on a port, and loopback is open to all. MLflow's own accounts need a further
database and a secret key; here one password opens both UIs.
"""

from __future__ import annotations

import hmac
import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from infra.platform.api import basic_auth

PASSWORD_VARIABLE = "FALAJ_MLFLOW_PASSWORD"
HOME_VARIABLE = "FALAJ_REPORTS_HOME"
REPORTS_PATH = re.compile(r"/((?:use_cases/[a-z][a-z0-9-]*/)?reports)(/|$)")
"""Folders of reports lie under the state folder as their addresses do: one for each use case."""
INDEX = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Run reports</title>
<body style="font-family: sans-serif; margin: 2em"><h1>Run reports</h1>
<ul>
{links}
</ul></body></html>
"""
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
        """Answer with a list of reports or a file of one, or pass on."""
        from starlette.exceptions import HTTPException
        from starlette.responses import HTMLResponse, PlainTextResponse
        from starlette.staticfiles import StaticFiles

        found = REPORTS_PATH.match(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        if scope["path"] in (f"/{found[1]}", f"/{found[1]}/"):
            await HTMLResponse(reports_index(self._home))(scope, receive, send)
            return
        # `latest` is a link to the newest.
        folder = StaticFiles(directory=self._home / found[1], check_dir=False, follow_symlink=True)
        try:
            await folder({**scope, "root_path": f"/{found[1]}"}, receive, send)
        except HTTPException as exc:
            answer = PlainTextResponse(f"{scope['path']}: {exc.detail}\n", exc.status_code)
            await answer(scope, receive, send)
        except RuntimeError:
            if (self._home / found[1]).is_dir():
                raise
            answer = PlainTextResponse(f"{scope['path']}: there is no report yet\n", 404)
            await answer(scope, receive, send)


def reports_index(home: Path) -> str:
    """A page with links to all reports of a state folder, the newest of each use case first."""
    links = [
        f'<li><a href="/{quote(page)}">{html.escape(page)}</a></li>' for page in _report_pages(home)
    ]
    none = "<li>There is no report yet. A finished run of the flow <b>pipeline</b> writes one.</li>"
    return INDEX.format(links="\n".join(links) or none)


def _report_pages(home: Path) -> Iterator[str]:
    """Their paths below the state folder; names of runs begin with the time of their start."""
    for folder in (home / "reports", *sorted(home.glob("use_cases/*/reports"))):
        pages = [page for page in folder.glob("*/*.html") if not page.parent.name.startswith(".")]
        pages.sort(key=lambda page: (page.parent.name == "latest", page), reverse=True)
        yield from (page.relative_to(home).as_posix() for page in pages)


def create_app() -> Any:
    """MLflow's application; the password, if any, is taken out of the environment."""
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    from mlflow.server.fastapi_app import app as mlflows_own

    app = WithReports(mlflows_own, Path(os.environ[HOME_VARIABLE]))
    return PasswordGate(app, password) if password else app
