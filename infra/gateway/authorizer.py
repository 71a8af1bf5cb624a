"""The platform's authorizer: whether a request that the gateway has may pass, and as whom.

Envoy asks here (ext_authz) on a socket that its owner alone can open, after it has checked token,
session or certificate. The answer is by `tasks/governance/access.yaml`. A yes brings what the
server behind asks for, its own password or token, which neither people nor their programs know.
Refusals, sign-ins and all that is no mere look are lines of the journal, written first: where the
line cannot be written, the answer is no.
"""

import base64
import json
import os
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from infra.gateway.config import AUTHORIZER_SOCKET
from infra.orchestration.client import platform_folder, read_password
from infra.platform.api import basic_auth
from infra.platform.config import MLFLOW_SECRET
from tasks.governance import identity
from tasks.governance.access import Asked, access_table
from tasks.governance.journal import Journal
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.files import file_state, private_folder

ADMIN_TOKEN = Path("serving") / "secrets" / "admin-token"
NAMES = " @.+:"  # besides letters; others have no place in a header
REMEMBERED, REFUSALS_PAUSE_S = 10_000, 1.0
RESUMED = re.compile(r"/api/flow_runs/([^/]+)/resume")
CERTIFICATE = re.compile(r'Subject="((?:[^"\\]|\\.)*)"')


class UnknownCallerError(FalajError):
    """Nobody is known to have sent this request."""


@dataclass(frozen=True)
class Call:
    """A request as Envoy describes it: the claims in its headers are verified."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Authorizer:
    """Decides for the platform of one state folder."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._journal = Journal(home / "audit")
        self._noted: OrderedDict[object, float] = OrderedDict()
        self._lock = threading.Lock()

    def decide(self, call: Call) -> tuple[int, str, dict[str, str]]:
        """Status, text and headers: 200 lets it pass, with headers for the server behind."""
        subject, asked = None, access_table().asked(call.method, call.path)
        try:
            config = _sign_in(self._home, file_state(identity.sign_in_file(self._home)))
            subject, session = self._caller(call, config)
            if subject.name in identity.switched_off(self._home):
                raise ConfigurationError("the account is switched off")
            if reason := access_table().refusal(subject, asked, config):
                raise ConfigurationError(reason)
            assert asked is not None
            self._note_entry(subject, session)
            if asked.action != "read":
                self._journal.append(asked.action, outcome="passed", **_facts(call, subject, asked))
            return 200, "", self._headers(subject, asked)
        except UnknownCallerError as exc:
            self._note_refusal(call, None, asked, str(exc))
            return 401, f"{exc}\n", {"www-authenticate": 'Bearer realm="falaj"'}
        except ConfigurationError as exc:
            self._note_refusal(call, subject, asked, str(exc))
            return 403, f"{exc}\n", {}
        except FalajError as exc:  # the journal cannot be written
            return 503, f"{exc}\n", {}

    def _caller(self, call: Call, config: identity.SignIn) -> tuple[identity.Subject, object]:
        """Who asks, and what is the same for all requests of one sign-in."""
        if told := call.headers.get("x-falaj-claims"):
            claims = json.loads(base64.urlsafe_b64decode(told + "=="))
            if over := identity.session_over(claims, config):
                raise UnknownCallerError(over)
            subject = identity.subject_of(claims, config)
            return subject, (subject, claims.get("iat"))
        found = CERTIFICATE.search(call.headers.get("x-forwarded-client-cert", ""))
        program = config.programs.get(found[1]) if found else None
        if found is None or program is None:
            raise UnknownCallerError("sign in: no token of this installation's issuer was shown")
        subject = identity.Subject(found[1], program.tenant, program.roles, program.use_cases)
        return subject, subject

    def _headers(self, subject: identity.Subject, asked: Asked) -> dict[str, str]:
        """For the server behind: its own key, and who asks."""
        folder = platform_folder(self._home)
        found = {"x-falaj-subject": quote(subject.name, safe=NAMES)}
        if asked.service == "prefect":
            found |= basic_auth(read_password(folder)) | identity.creator_headers(subject.name)
        elif asked.service in ("mlflow", "reports"):
            found |= basic_auth(read_password(folder, MLFLOW_SECRET) or read_password(folder))
        elif asked.service == "serving":
            token = (self._home / ADMIN_TOKEN).read_text(encoding="ascii").strip()
            found["authorization"] = f"Bearer {token}"
        return found

    def _note_entry(self, subject: identity.Subject, session: object) -> None:
        """A line when somebody comes with a sign-in that was not seen yet."""
        with self._lock:
            if session not in self._noted:
                who = {"subject": subject.name, "tenant": subject.tenant, "roles": subject.roles}
                self._journal.append("sign-in", outcome="ok", who=who)
                self._is_new(session, 0)

    def _note_refusal(
        self, call: Call, subject: identity.Subject | None, asked: Asked | None, reason: str
    ) -> None:
        """A line for a refusal; of equal ones a line a second."""
        with self._lock:
            is_new = self._is_new((subject, asked, reason), REFUSALS_PAUSE_S)
        if is_new:
            facts = _facts(call, subject, asked)
            self._journal.append("refuse", outcome="refused", reason=reason, **facts)

    def _is_new(self, kind: object, for_s: float) -> bool:
        """True where it was not noted for so long; what was noted longest ago is forgotten."""
        noted = self._noted.get(kind)
        if noted is not None and time.monotonic() - noted < for_s:
            return False
        self._noted[kind] = time.monotonic()
        self._noted.move_to_end(kind)
        if len(self._noted) > REMEMBERED:
            self._noted.popitem(last=False)
        return True


@lru_cache(maxsize=1)
def _sign_in(home: Path, _: object) -> identity.SignIn:
    """How people sign in, read again where the state of its file is another."""
    config = identity.read_sign_in(home)
    if config is None:
        raise ConfigurationError("nobody can sign in here")
    return config


def _facts(call: Call, subject: identity.Subject | None, asked: Asked | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "subject": {"method": call.method[:20], "path": call.path[:200]},
        "who": {"subject": subject and subject.name, "tenant": subject and subject.tenant},
    }
    if asked is not None:
        facts |= {"service": asked.service, "use_case": asked.use_case}
    if run := RESUMED.fullmatch(call.path):
        facts["flow_run"] = run[1]
        try:
            facts["said"] = json.loads(call.body)["run_input"]["decision"]
        except (ValueError, KeyError, TypeError):
            facts["said"] = None
    return facts


def authorizer_app(home: Path) -> Starlette:
    """The authorizer, and two pages of its own: who one is, and one's token for `falaj login`."""
    authorizer = Authorizer(home)

    async def decide(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = scope["raw_path"].decode("latin-1").removeprefix("/decide")
        call = Call(request.method, path, request.headers, await request.body())
        status, text, headers = await run_in_threadpool(authorizer.decide, call)
        await PlainTextResponse(text, status, headers)(scope, receive, send)

    def page(request: Request) -> Response:
        shown = {
            "/ready": "LIVE",
            "/sign-in/whoami": unquote(request.headers.get("x-falaj-subject", "")),
            "/sign-in/token": request.cookies.get("IdToken"),
        }[request.url.path]
        return PlainTextResponse(f"{shown or ''}\n", headers={"cache-control": "no-store"})

    pages = [Route(path, page) for path in ("/ready", "/sign-in/whoami", "/sign-in/token")]
    return Starlette(routes=[Mount("/decide", decide), *pages])


def run_authorizer(home: Path, folder: Path) -> None:
    """Answer Envoy until a stop signal."""
    private_folder(folder)
    os.chdir(folder)  # a full path may be too long for a socket
    Path(AUTHORIZER_SOCKET).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(AUTHORIZER_SOCKET)
    Path(AUTHORIZER_SOCKET).chmod(0o600)
    config = uvicorn.Config(
        authorizer_app(home),
        http="h11",
        ws="none",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=120,
    )
    uvicorn.Server(config).run(sockets=[listening])
