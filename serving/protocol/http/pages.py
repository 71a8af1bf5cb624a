"""Pages of both listeners: all but the answers of models.

Public: health, metadata and repository of the Open Inference Protocol, and its description. Admin,
on loopback: deployment tracks, loading, states, metrics; one token opens all of them.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response as Page
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.errors import BadRequestError, ServingError, UnauthorizedError
from serving.interfaces import Action, Pages, Track
from serving.protocol import answers, messages
from serving.protocol.front import Front
from serving.protocol.http.framing import Head
from serving.protocol.http.openapi import OPERATIONS, IndexRequest, LoadRequest, document
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import locked, private_folder, write_atomically

if TYPE_CHECKING:
    from serving.engine.engine import ModelEngine

TOKEN_FILE = Path("serving") / "secrets" / "admin-token"
Admit = Callable[[Request], None]
Kind = TypeVar("Kind")


class PublicPages:
    """Health, metadata and repository of one process: a method for each of `OPERATIONS`."""

    def __init__(self, front: Front) -> None:
        self._front, self._engine = front, front.engine

    def application(self) -> Starlette:
        """The pages, routed."""
        routes = []
        for one in OPERATIONS:
            answer = getattr(self, one.name.removesuffix("_version"))
            admit = partial(self._admit, one.action) if one.action else _everybody
            routes.append(_route(one.method, one.path, answer, admit))
        return application(*routes)

    def _admit(self, action: Action, request: Request) -> None:
        address = request.client.host if request.client else ""
        model = request.path_params.get("model")
        self._front.guard.admit(request.headers.raw, address, action, model)

    async def live(self, request: Request) -> Any:
        """Asked without credentials, by whatever watches the process; so is `ready`."""
        return {"live": True}

    async def ready(self, request: Request) -> Any:
        """503 where a model does not answer."""
        ready = self._front.is_ready()
        return json_response({"ready": ready}, 200 if ready else 503)

    async def server(self, request: Request) -> Any:
        """Of the server itself."""
        return messages.server_metadata()

    async def metadata(self, request: Request) -> Any:
        """Of a model, or a version."""
        return messages.model_metadata(self._engine, *_names(request))

    async def model_ready(self, request: Request) -> Any:
        """Whether a model, or a version, answers; where not, why."""
        name, version = _names(request)
        states = messages.known_states(self._engine, name, version)
        if self._front.is_ready(name, version):
            return {"name": name, "ready": True}
        reasons = [s.reason for s in states if version in (None, s.version) and s.reason]
        return json_response({"name": name, "ready": False, "reason": "; ".join(reasons)}, 503)

    async def infer(self, request: Request) -> Any:
        """Refuse a name that is none; requests for answers are routed before."""
        raise BadRequestError(f"model {_names(request)[0]!r} is no name that can be asked")

    async def index(self, request: Request) -> Any:
        """All versions, or those that are ready."""
        return messages.repository_index(self._engine, (await decoded(request, IndexRequest)).ready)

    async def load(self, request: Request) -> Any:
        """Load what the registry names, or a version."""
        name, version = _names(request)[0], (await decoded(request, LoadRequest)).parameters.version
        return {"name": name, **messages.version_state(await self._engine.load(name, version))}

    async def unload(self, request: Request) -> Any:
        """Take a version, or all, out of service."""
        name, version = _names(request)[0], (await decoded(request, LoadRequest)).parameters.version
        messages.known_states(self._engine, name, version)
        await self._engine.unload(name, version)
        return {"name": name, "unloaded": True}

    async def openapi(self, request: Request) -> Any:
        """The description of all pages."""
        return document()


def admin_pages(engine: ModelEngine, token: str, extra: Pages) -> Starlette:
    """What the release flow and people change in a running process.

    Args:
        token: opens all pages.
        extra: more of them.
    """

    def admit(request: Request) -> None:
        kind, _, presented = request.headers.get("authorization", "").partition(" ")
        found = presented.strip().encode("latin-1")
        if kind.lower() == "basic" and request.method in ("GET", "HEAD"):
            found = _password(found)
        elif kind.lower() != "bearer":
            found = b""
        if not hmac.compare_digest(found, token.encode()):
            raise UnauthorizedError(
                f"the admin interface takes `Authorization: Bearer` with the token of {TOKEN_FILE} "
                "in the state folder; a browser that looks at a page gives it as the password"
            )

    async def shown(request: Request) -> Any:
        content_type, body = extra[request.url.path]()
        # Such a page may have scripts, and has its own policy for them.
        headers = {"content-security-policy": "frame-ancestors 'none'"}
        return Page(body, 200, headers | {"content-type": content_type})

    async def models(request: Request) -> Any:
        return messages.repository_index(engine, only_ready=False)

    async def model(request: Request) -> Any:
        return messages.admin_state(engine, _names(request)[0])

    async def set_tracks(request: Request) -> Any:
        name, _ = _names(request)
        tracks = await decoded(request, dict[Track, str | None])
        if not tracks:
            raise BadRequestError('name a track at least, as {"stable": "3", "candidate": null}')
        await engine.set_tracks(name, tracks)
        return messages.admin_state(engine, name)

    return application(
        _route("GET", "/admin/models", models, admit),
        _route("GET", "/admin/models/{model}", model, admit),
        _route("POST", "/admin/models/{model}/slots", set_tracks, admit),
        *(_route("GET", path, shown, admit) for path in extra),
        for_browsers=True,
    )


def _everybody(request: Request) -> None:
    """Nobody is asked who they are."""


def _route(
    method: str, path: str, answer: Callable[[Request], Awaitable[Any]], admit: Admit
) -> Route:
    """A page whose answer is a response, or plain data."""

    async def page(request: Request) -> Page:
        admit(request)
        found = await answer(request)
        return found if isinstance(found, Page) else json_response(found)

    return Route(path, page, methods=[method])


def application(*routes: Route, for_browsers: bool = False) -> Starlette:
    """Pages whose refusals are JSON.

    Args:
        for_browsers: let a browser ask for a password where nobody is known.
    """

    async def refused(request: Request, error: Exception) -> Page:
        assert isinstance(error, ServingError)
        headers = {name.decode(): value.decode() for name, value in answers.refusal_headers(error)}
        if for_browsers and isinstance(error, UnauthorizedError):
            headers["www-authenticate"] = 'Basic realm="falaj admin", charset="UTF-8"'
        return Page(answers.encode_error(str(error)), error.status, headers)

    async def unrouted(request: Request, error: Exception) -> Page:
        assert isinstance(error, HTTPException)
        path, allowed = request.url.path[:200], (error.headers or {}).get("Allow")
        reason = f"nothing is at {path}; GET /openapi.json describes what is"
        if allowed:
            reason = f"{path} takes {allowed}, not {request.method[:20]}"
        headers = {"allow": allowed} if allowed else {}
        return Page(answers.encode_error(reason), error.status_code, headers, "application/json")

    handlers = {ServingError: refused, HTTPException: unrouted}
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.router.redirect_slashes = False
    return made


async def ask(
    application: ASGIApp,
    head: Head,
    address: str,
    body: bytes,
    request_id: str,
    done: Callable[[answers.Response], None],
) -> None:
    """Let an application answer a whole request."""
    sent: list[MutableMapping[str, Any]] = []
    path, _, query = head.target.partition(b"?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": head.method.decode(),
        "path": unquote(path.decode()),
        "query_string": query,
        "headers": head.headers,
        "client": (address, 0),
    }

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    try:
        await application(scope, receive, send)
    except Exception as error:
        done(answers.encode_refusal(error, request_id))
        return
    start, *bodies = sent
    headers = dict(answers.SECURITY) | {b"x-request-id": request_id.encode()}
    headers |= {name: value for name, value in start["headers"] if name != b"content-length"}
    content = b"".join([message.get("body", b"") for message in bodies])
    done(answers.Response(answers.head_of(start["status"], headers.items()), content))


def json_response(value: Any, status: int = 200) -> Page:
    """Plain data as a response."""
    return Page(msgspec.json.encode(value), status, media_type="application/json")


async def decoded(request: Request, kind: type[Kind]) -> Kind:
    """A request's body; an empty one means all defaults.

    Raises:
        BadRequestError: it is not of that kind.
    """
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequestError(f"the body is not what is taken here: {exc}") from exc


def _names(request: Request) -> tuple[str, str | None]:
    """Model and version of a path."""
    return request.path_params["model"], request.path_params.get("version")


def _password(encoded: bytes) -> bytes:
    """Of `Basic` credentials, which browsers ask people for.

    Only to look at pages: a browser sends them by itself, also where another site made it ask.
    """
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def admin_token(home: Path) -> str:
    """The token of a state folder, made at the first call; only its owner can read the file.

    Raises:
        ConfigurationError: others may read it, or it is empty.
    """
    file = home / TOKEN_FILE
    private_folder(file.parent)
    with locked(file.parent / ".lock"):  # several processes may start at one time
        if not file.exists():
            write_atomically(file, secrets.token_urlsafe(32) + "\n", private=True)
    token = file.read_text(encoding="ascii").strip()
    if len(token) < 16 or file.stat().st_mode & 0o077:
        raise ConfigurationError(
            f"{file} is too short, or others may read it; remove it, and the next start makes a "
            "new one. Nothing was started"
        )
    return token
