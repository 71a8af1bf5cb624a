"""Pages of both listeners: all but the answers of models.

Public: health, metadata and repository of the Open Inference Protocol, and its description. Admin,
on loopback: deployment tracks, loading, states, metrics; one token opens all of them.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response as Page
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.errors import BadRequestError, ServingError, UnauthorizedError
from serving.interfaces import Action, Engine, Pages
from serving.protocol.answers import (
    SECURITY_HEADERS,
    Response,
    encode_error,
    encode_refusal,
    head_of,
    refusal_headers,
)
from serving.protocol.front import Front
from serving.protocol.http.framing import Head
from serving.protocol.http.openapi import (
    IndexRequest,
    LoadRequest,
    VersionRequest,
    document,
)
from serving.protocol.messages import (
    admin_state,
    model_metadata,
    refuse_unknown,
    repository_index,
    server_metadata,
    version_state,
)
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import private_folder, write_atomically

TOKEN_FILE = Path("serving") / "secrets" / "admin-token"
Admit = Callable[[Request], None]
Kind = TypeVar("Kind", bound=msgspec.Struct)


class Tracks(msgspec.Struct, forbid_unknown_fields=True):
    """Versions of tracks; one that is not named stays as it is, null empties it."""

    stable: str | msgspec.UnsetType | None = msgspec.UNSET
    candidate: str | msgspec.UnsetType | None = msgspec.UNSET
    shadow: str | msgspec.UnsetType | None = msgspec.UNSET


class PublicPages:
    """Health, metadata and repository of one process."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._engine = front.engine

    def application(self) -> Starlette:
        """The pages, routed."""
        model = "/v2/models/{model}"
        repository = "/v2/repository/models/{model}"
        return application(
            _route("/v2/health/live", self._live),
            _route("/v2/health/ready", self._ready),
            _route("/v2", self._server, self._admit("read")),
            *(
                route
                for path in (model, model + "/versions/{version}")
                for route in (
                    _route(path, self._metadata, self._admit("read")),
                    _route(path + "/ready", self._model_ready, self._admit("read")),
                    _route(path + "/infer", self._infer, method="POST"),
                )
            ),
            _route("/v2/repository/index", self._index, self._admit("admin"), "POST"),
            _route(repository + "/load", self._load, self._admit("admin"), "POST"),
            _route(repository + "/unload", self._unload, self._admit("admin"), "POST"),
            _route("/openapi.json", self._openapi, self._admit("read")),
        )

    def _admit(self, action: Action) -> Admit:
        def admit(request: Request) -> None:
            address = request.client.host if request.client else ""
            model = request.path_params.get("model")
            self._front.guard.admit(request.headers.raw, address, action, model)

        return admit

    async def _live(self, request: Request) -> Any:
        """Whether the process answers. Asked without credentials, by whatever watches it."""
        return {"live": True}

    async def _ready(self, request: Request) -> Any:
        """Whether all models answer. Asked without credentials too."""
        ready = not self._front.stopping and self._engine.is_ready()
        return json_response({"ready": ready}, 200 if ready else 503)

    async def _server(self, request: Request) -> Any:
        return server_metadata()

    async def _metadata(self, request: Request) -> Any:
        return model_metadata(self._engine, *_names(request))

    async def _model_ready(self, request: Request) -> Any:
        """Whether a model, or a version, answers; where not, why."""
        name, version = _names(request)
        refuse_unknown(self._engine, name, version)
        ready = not self._front.stopping and self._engine.is_ready(name, version)
        state: dict[str, Any] = {"name": name, "ready": ready}
        if not ready:
            states = [s for s in self._engine.states() if s.name == name]
            reasons = [s.reason for s in states if version in (None, s.version) and s.reason]
            state["reason"] = "; ".join(reasons)
        return json_response(state, 200 if ready else 503)

    async def _infer(self, request: Request) -> Any:
        """Refuse a name that is none; requests for answers are routed before."""
        raise BadRequestError(f"model {_names(request)[0]!r} is no name that can be asked")

    async def _index(self, request: Request) -> Any:
        return repository_index(self._engine, (await decoded(request, IndexRequest)).ready)

    async def _load(self, request: Request) -> Any:
        """Load what the registry names, or a version."""
        name, version = _names(request)[0], (await decoded(request, LoadRequest)).parameters.version
        return {"name": name, **version_state(await self._engine.load(name, version))}

    async def _unload(self, request: Request) -> Any:
        version = (await decoded(request, LoadRequest)).parameters.version
        return await _unloaded(self._engine, _names(request)[0], version)

    async def _openapi(self, request: Request) -> Any:
        return document()


class AdminPages:
    """What the release flow and people change in a running process."""

    def __init__(self, front: Front, token: str, extra: Pages) -> None:
        self._engine = front.engine
        self._token = token.encode()
        self._extra = extra

    def application(self) -> Starlette:
        """The pages, routed."""
        model = "/admin/models/{model}"
        return application(
            _route("/admin/models", self._models, self._admit),
            _route(model, self._model, self._admit),
            _route(model + "/slots", self._set_tracks, self._admit, "POST"),
            _route(model + "/load", self._load, self._admit, "POST"),
            _route(model + "/unload", self._unload, self._admit, "POST"),
            *(_route(path, self._shown, self._admit) for path in self._extra),
            for_browsers=True,
        )

    def _admit(self, request: Request) -> None:
        kind, _, presented = request.headers.get("authorization", "").partition(" ")
        token = presented.strip().encode("latin-1")
        if kind.lower() == "basic" and request.method in ("GET", "HEAD"):
            token = _password(token)
        elif kind.lower() != "bearer":
            token = b""
        if not hmac.compare_digest(token, self._token):
            raise UnauthorizedError(
                f"the admin interface takes `Authorization: Bearer` with the token of {TOKEN_FILE} "
                "in the state folder; a browser that looks at a page gives it as the password"
            )

    async def _shown(self, request: Request) -> Any:
        content_type, body = self._extra[request.url.path]()
        # Such a page may have scripts, and has its own policy for them.
        headers = {"content-security-policy": "frame-ancestors 'none'"}
        return Page(body, 200, headers | {"content-type": content_type})

    async def _models(self, request: Request) -> Any:
        return repository_index(self._engine, only_ready=False)

    async def _model(self, request: Request) -> Any:
        return admin_state(self._engine, _names(request)[0])

    async def _set_tracks(self, request: Request) -> Any:
        """Set which version each track means, all at once."""
        name, _ = _names(request)
        wanted = msgspec.structs.asdict(await decoded(request, Tracks))
        tracks = {t: version for t, version in wanted.items() if version is not msgspec.UNSET}
        if not tracks:
            raise BadRequestError('name a track at least, as {"stable": "3", "candidate": null}')
        await self._engine.set_tracks(name, tracks)  # type: ignore[arg-type]
        return admin_state(self._engine, name)

    async def _load(self, request: Request) -> Any:
        version = (await decoded(request, VersionRequest)).version
        return version_state(await self._engine.load(_names(request)[0], version))

    async def _unload(self, request: Request) -> Any:
        version = (await decoded(request, VersionRequest)).version
        return await _unloaded(self._engine, _names(request)[0], version)


async def _unloaded(engine: Engine, name: str, version: str | None) -> dict[str, Any]:
    """Take a version, or all, out of service."""
    refuse_unknown(engine, name, version)
    await engine.unload(name, version)
    return {"name": name, "unloaded": True}


def _route(
    path: str,
    answer: Callable[[Request], Awaitable[Any]],
    admit: Admit = lambda request: None,
    method: str = "GET",
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
        headers = {name.decode(): value.decode() for name, value in refusal_headers(error)}
        if for_browsers and isinstance(error, UnauthorizedError):
            headers["www-authenticate"] = 'Basic realm="falaj admin", charset="UTF-8"'
        return Page(encode_error(str(error)), error.status, headers)

    async def unrouted(request: Request, error: Exception) -> Page:
        assert isinstance(error, HTTPException)
        path, allowed = request.url.path[:200], (error.headers or {}).get("Allow")
        reason = f"nothing is at {path}; GET /openapi.json describes what is"
        if allowed:
            reason = f"{path} takes {allowed}, not {request.method[:20]}"
        headers = {"allow": allowed} if allowed else {}
        return Page(encode_error(reason), error.status_code, headers, "application/json")

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
    done: Callable[[Response], None],
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
        done(encode_refusal(error, request_id))
        return
    start, *bodies = sent
    headers = dict(SECURITY_HEADERS) | {b"x-request-id": request_id.encode()}
    headers |= {name: value for name, value in start["headers"] if name != b"content-length"}
    content = b"".join([message.get("body", b"") for message in bodies])
    done(Response(head_of(start["status"], headers.items()), content))


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
    if not file.exists():
        before = os.umask(0o077)
        try:
            write_atomically(file, secrets.token_urlsafe(32) + "\n")
        finally:
            os.umask(before)
    token = file.read_text(encoding="ascii").strip()
    if len(token) < 16 or file.stat().st_mode & 0o077:
        raise ConfigurationError(
            f"{file} is too short, or others may read it; remove it, and the next start makes a "
            "new one. Nothing was started"
        )
    return token
