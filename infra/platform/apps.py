"""The platform's two web applications: Prefect's and MLflow's own, and what no setting mends.

Prefect:

- Transactions on SQLite begin as writers. Prefect begins most of them as readers. Where another one
  has written before such a transaction does, SQLite refuses at once ("database is locked"), however
  long it may wait. A writer waits for its turn.
- A connection that is dropped within a transaction is rolled back first. SQLAlchemy closes the
  connection of a cancelled coroutine. SQLite keeps the transaction, and the lock of all writers,
  until each statement of that connection is gone: Python's garbage collector decides when.
- Pages send requests to this server alone. Prefect's newer UI calls an analytics service though
  analytics is off; a content security policy has the browser refuse it.
- A locked database is one line in the log, not a hundred. An idle server rests longer.

MLflow: the run reports are beside it, both behind the platform's password. Without one any user of
the machine could move the champion, although the files belong to one: MLflow listens on a port, and
loopback is open to all. MLflow's own accounts need a further database and a secret key; here one
password opens both UIs.
"""

import hmac
import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Template
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from infra.platform.api import basic_auth
from infra.platform.config import MLFLOW_PASSWORD, REPORTS_HOME
from tasks.kernel.settings import bring

LOOK_EVERY = timedelta(seconds=1)

REPORTS_PATH = re.compile(r"/((?:use_cases/[a-z][a-z0-9-]*/)?reports)(/|$)")
"""Folders of reports lie under the state folder as their addresses do: one for each use case."""
INDEX = Path(__file__).with_name("reports.html.j2")


def rest_longer() -> None:
    """Let Prefect's background worker look at its clock each second and not four times.

    It serves loops of seconds and minutes, and looking costs a fifth of an idle server. What is
    asked of it at once still wakes it at once.
    """
    module: Any = import_module("prefect.server.api.background_workers")
    module.Worker = partial(
        module.Worker, minimum_check_interval=LOOK_EVERY, scheduling_resolution=LOOK_EVERY
    )


def begin_as_writer() -> None:
    """Let each transaction of Prefect's on SQLite take the lock of writers when it begins.

    None of them opens another one within it, so that none waits for itself.
    """
    module: Any = import_module("prefect.server.database.configurations")
    begin = module.AioSqliteConfiguration.begin_transaction

    def begin_transaction(self: Any, session: Any, with_for_update: bool = True) -> Any:
        return begin(self, session, with_for_update=True)

    module.AioSqliteConfiguration.begin_transaction = begin_transaction


def roll_back_when_dropped() -> None:
    """Let SQLAlchemy roll back an SQLite connection before it closes it by force."""
    module: Any = import_module("sqlalchemy.dialects.sqlite.aiosqlite")
    adapted = module.AsyncAdapt_aiosqlite_connection
    close, force = adapted._terminate_graceful_close, adapted._terminate_force_close

    def roll_back(connection: Any) -> None:
        """After what its thread does now; that thread is done with the rest in order."""
        if (opened := connection._connection._connection) is not None:
            connection._connection._tx.put_nowait((None, opened.rollback))

    async def close_gracefully(self: Any) -> None:
        roll_back(self)
        await close(self)

    def close_by_force(self: Any) -> None:
        roll_back(self)
        force(self)

    adapted._terminate_graceful_close = close_gracefully
    adapted._terminate_force_close = close_by_force


def log_busy_in_one_line() -> None:
    """Leave the traceback out of a record that tells of a locked SQLite database."""
    make = logging.getLogRecordFactory()

    def make_shorter(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.exc_info and (busy := _found_busy(record.exc_info[1])):
            record.msg, record.args = f"{record.getMessage()}: SQLite: {busy}", ()
            record.exc_info = None
        return record

    logging.setLogRecordFactory(make_shorter)


def _found_busy(error: BaseException | None) -> sqlite3.OperationalError | None:
    """The error of SQLite that an error came from, where that is one of a locked database."""
    while error is not None:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            return error
        error = error.__cause__ or error.__context__
    return None


class OwnAddressesOnly:
    """Has browsers ask nobody but the server itself, whatever its pages want.

    Args:
        app: the ASGI application behind it.
        api_url: address of the API as pages know it; may be of another origin than the pages.
    """

    def __init__(self, app: Any, api_url: str) -> None:
        self._app = app
        self._header = (b"content-security-policy", content_security_policy(api_url).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; answers to HTTP requests carry the policy."""

        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._app(scope, receive, send_with_policy if scope["type"] == "http" else send)


def content_security_policy(api_url: str) -> str:
    """What pages may use: their own origin, the API's, and what they make themselves.

    The graph of a run compiles functions ('unsafe-eval') and draws in workers made of blobs.
    """
    parts = urlsplit(api_url)
    api = f" {parts.scheme}://{parts.netloc}" if parts.netloc else ""
    return (
        "default-src 'self'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; "
        f"connect-src 'self' data: blob:{api}; "
        "object-src 'none'; base-uri 'self'; form-action 'self'"
    )


def create_prefect() -> Any:
    """Prefect's application, for uvicorn."""
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_UI_API_URL

    log_busy_in_one_line()
    begin_as_writer()
    roll_back_when_dropped()
    rest_longer()
    return OwnAddressesOnly(create_app(), PREFECT_UI_API_URL.value() or "")


class PasswordGate:
    """Lets a request pass that carries the password (HTTP Basic); browsers ask for it.

    Args:
        app: the ASGI application behind it.
        password: the line `user:password`.
    """

    def __init__(self, app: Any, password: str) -> None:
        self._app = app
        self._expected = basic_auth(password)["Authorization"].removeprefix("Basic ").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse with 401; a web socket is closed."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            asks = {"www-authenticate": 'Basic realm="MLflow", charset="UTF-8"'}
            await PlainTextResponse("User and password, please.\n", 401, asks)(scope, receive, send)

    def _may_pass(self, scope: Any) -> bool:
        if scope["type"] == "http" and scope["path"] in ("/health", "/version"):
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a list of reports or a file of one, or pass on."""
        found = REPORTS_PATH.match(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        if scope["path"] in (f"/{found[1]}", f"/{found[1]}/"):
            await HTMLResponse(reports_index(self._home))(scope, receive, send)
            return
        page = self._home / "catalogue" / "index.html"
        if scope["path"].rstrip("/") == "/reports/catalogue" and bring(page).is_file():
            served: Any = FileResponse(page)
        elif (folder := self._home / found[1]).is_dir():
            # `latest` is a link to the newest.
            served = StaticFiles(directory=folder, follow_symlink=True)
        else:
            served = PlainTextResponse(f"{scope['path']}: there is no report yet\n", 404)
        try:
            await served({**scope, "root_path": f"/{found[1]}"}, receive, send)
        except HTTPException as exc:
            answer = PlainTextResponse(f"{scope['path']}: {exc.detail}\n", exc.status_code)
            await answer(scope, receive, send)


def reports_index(home: Path) -> str:
    """A page with links to all reports of a state folder, the newest of each use case first."""
    page = Template(INDEX.read_text(encoding="utf-8"), autoescape=True)
    text: str = page.render(pages=list(_report_pages(home)))
    return text


def _report_pages(home: Path) -> Iterator[str]:
    """Their paths below the state folder; names of runs begin with the time of their start."""
    for folder in (bring(home / "reports"), *sorted(home.glob("use_cases/*/reports"))):
        pages = [page for page in folder.glob("*/*.html") if not page.parent.name.startswith(".")]
        pages.sort(key=lambda page: (page.parent.name == "latest", page), reverse=True)
        yield from (page.relative_to(home).as_posix() for page in pages)


def create_mlflow() -> Any:
    """MLflow's application; the password, if any, is taken out of the environment."""
    password = os.environ.pop(MLFLOW_PASSWORD, None)
    from mlflow.server.fastapi_app import app

    served = WithReports(app, Path(os.environ[REPORTS_HOME]))
    return PasswordGate(served, password) if password else served
