"""Pages of both listeners: all but the answers of models.

Public: health, metadata and repository of the Open Inference Protocol, and its description. Admin,
on loopback: deployment tracks, loading, states, metrics; one token opens all of them.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.errors import BadRequestError, ServingError, UnauthorizedError
from serving.interfaces import Action, Pages
from serving.protocol.answers import JSON, SECURITY_HEADERS, encode_error, refusal_headers
from serving.protocol.front import Front, RequestIds
from serving.protocol.http.openapi import (
    DOCS_POLICY,
    IndexRequest,
    LoadRequest,
    VersionRequest,
    docs_html,
    document,
)
from serving.protocol.metadata import (
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
Page = Callable[[Request], Awaitable[Response]]
Kind = TypeVar("Kind", bound=msgspec.Struct)


class Slots(msgspec.Struct, forbid_unknown_fields=True):
    """Versions of slots; one that is not named stays as it is, null empties it."""

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
        both = (model, model + "/versions/{version}")
        repository = "/v2/repository/models/{model}"
        routes = [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            *(Route(path, self.metadata) for path in both),
            *(Route(path + "/ready", self.model_ready) for path in both),
            *(Route(path + "/infer", self.infer, methods=["POST"]) for path in both),
            Route("/v2/repository/index", self.index, methods=["POST"]),
            Route(repository + "/load", self.load, methods=["POST"]),
            Route(repository + "/unload", self.unload, methods=["POST"]),
            Route("/openapi.json", self.openapi),
            Route("/v2/docs", self.docs),
        ]
        return application(routes, self._front.ids)

    def _admit(self, request: Request, action: Action, model: str | None = None) -> None:
        address = request.client.host if request.client else ""
        self._front.guard.admit(request.headers.raw, address, action, model)

    async def live(self, request: Request) -> Response:
        """Whether the process answers. Asked without credentials, by whatever watches it."""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """Whether all models answer. Asked without credentials too."""
        ready = not self._front.stopping and self._engine.is_ready()
        return json_response({"ready": ready}, 200 if ready else 503)

    async def server(self, request: Request) -> Response:
        """Name, version and extensions of the server."""
        self._admit(request, "read")
        return json_response(server_metadata())

    async def metadata(self, request: Request) -> Response:
        """Tensors and versions of a model."""
        name, version = _names(request)
        self._admit(request, "read", name)
        return json_response(model_metadata(self._engine, name, version))

    async def model_ready(self, request: Request) -> Response:
        """Whether a model, or a version, answers; where not, why."""
        name, version = _names(request)
        self._admit(request, "read", name)
        refuse_unknown(self._engine, name, version)
        ready = not self._front.stopping and self._engine.is_ready(name, version)
        state: dict[str, Any] = {"name": name, "ready": ready}
        if not ready:
            states = [s for s in self._engine.states() if s.name == name]
            reasons = [s.reason for s in states if version in (None, s.version) and s.reason]
            state["reason"] = "; ".join(reasons)
        return json_response(state, 200 if ready else 503)

    async def infer(self, request: Request) -> Response:
        """Refuse a name that is none; requests for answers are routed before."""
        raise BadRequestError(f"model {_names(request)[0]!r} is no name that can be asked")

    async def index(self, request: Request) -> Response:
        """All versions of all models."""
        self._admit(request, "admin")
        wanted = await decoded(request, IndexRequest)
        return json_response(repository_index(self._engine, wanted.ready))

    async def load(self, request: Request) -> Response:
        """Load what the registry names, or a version."""
        name, _ = _names(request)
        self._admit(request, "admin", name)
        wanted = await decoded(request, LoadRequest)
        state = await self._engine.load(name, wanted.parameters.version)
        return json_response({"name": name, **version_state(state)})

    async def unload(self, request: Request) -> Response:
        """Take a model, or a version, out of service."""
        name, _ = _names(request)
        self._admit(request, "admin", name)
        version = (await decoded(request, LoadRequest)).parameters.version
        refuse_unknown(self._engine, name, version)
        await self._engine.unload(name, version)
        return json_response({"name": name, "unloaded": True})

    async def openapi(self, request: Request) -> Response:
        """The description of all this for programs."""
        self._admit(request, "read")
        return json_response(document())

    async def docs(self, request: Request) -> Response:
        """The description of all this for people."""
        self._admit(request, "read")
        headers = {"content-security-policy": DOCS_POLICY}
        return Response(docs_html(), 200, headers, "text/html; charset=utf-8")


class AdminPages:
    """What the release flow and people change in a running process."""

    def __init__(self, front: Front, token: str, extra: Pages) -> None:
        self._engine = front.engine
        self._ids = front.ids
        self._token = token.encode()
        self._extra = extra

    def application(self) -> Starlette:
        """The pages, routed."""
        model = "/admin/models/{model}"
        pages: list[tuple[str, str, Page]] = [
            ("GET", "/admin/models", self.models),
            ("GET", model, self.model),
            ("POST", model + "/slots", self.set_slots),
            ("POST", model + "/load", self.load),
            ("POST", model + "/unload", self.unload),
            *(("GET", path, self._shown(path)) for path in self._extra),
        ]
        routes = [Route(path, self._guarded(page), methods=[how]) for how, path, page in pages]
        return application(routes, self._ids, for_browsers=True)

    def _guarded(self, page: Page) -> Page:
        async def guarded(request: Request) -> Response:
            self._admit(request)
            return await page(request)

        return guarded

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

    def _shown(self, path: str) -> Page:
        async def shown(request: Request) -> Response:
            content_type, body = self._extra[path]()
            # Such a page may have scripts, and has its own policy for them.
            headers = {"content-security-policy": "frame-ancestors 'none'"}
            response = Response(body, 200, headers)
            response.headers["content-type"] = content_type
            return response

        return shown

    async def models(self, request: Request) -> Response:
        """All versions of all models."""
        return json_response(repository_index(self._engine, only_ready=False))

    async def model(self, request: Request) -> Response:
        """Slots and versions of a model."""
        return json_response(admin_state(self._engine, _names(request)[0]))

    async def set_slots(self, request: Request) -> Response:
        """Set which version each slot means, all at once."""
        name, _ = _names(request)
        wanted = msgspec.structs.asdict(await decoded(request, Slots))
        slots = {slot: version for slot, version in wanted.items() if version is not msgspec.UNSET}
        if not slots:
            raise BadRequestError('name a slot at least, as {"stable": "3", "candidate": null}')
        await self._engine.set_slots(name, slots)  # type: ignore[arg-type]
        return json_response(admin_state(self._engine, name))

    async def load(self, request: Request) -> Response:
        """Load a version, check it, make it ready."""
        version = (await decoded(request, VersionRequest)).version
        return json_response(version_state(await self._engine.load(_names(request)[0], version)))

    async def unload(self, request: Request) -> Response:
        """Take a version, or all, out of service."""
        version = (await decoded(request, VersionRequest)).version
        name, _ = _names(request)
        refuse_unknown(self._engine, name, version)
        await self._engine.unload(name, version)
        return json_response({"name": name, "unloaded": True})


def application(routes: list[Route], ids: RequestIds, for_browsers: bool = False) -> Starlette:
    """Pages whose refusals are JSON, each answer with the headers that all have.

    Args:
        for_browsers: let a browser ask for a password where nobody is known.
    """

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServingError)
        response = Response(encode_error(str(error)), error.status)
        response.raw_headers[:] = refusal_headers(error)
        response.headers["content-length"] = str(len(response.body))
        if for_browsers and isinstance(error, UnauthorizedError):
            response.headers["www-authenticate"] = 'Basic realm="falaj admin", charset="UTF-8"'
        return response

    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, allowed = request.url.path[:200], (error.headers or {}).get("Allow")
        reason = f"nothing is at {path}; GET /openapi.json describes what is"
        if allowed:
            reason = f"{path} takes {allowed}, not {request.method[:20]}"
        headers = {"allow": allowed} if allowed else {}
        return Response(encode_error(reason), error.status_code, headers, "application/json")

    made = Starlette(
        routes=routes, exception_handlers={ServingError: refused, HTTPException: unrouted}
    )
    made.router.redirect_slashes = False
    made.add_middleware(CommonHeaders, ids=ids)
    return made


class CommonHeaders:
    """ASGI middleware: headers of every answer, where the page has not set them itself."""

    def __init__(self, app: Any, ids: RequestIds) -> None:
        self._app = app
        self._ids = ids

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        sent = dict(scope["headers"]).get(b"x-request-id")
        common = [*SECURITY_HEADERS, (b"x-request-id", self._ids.accepted(sent).encode())]

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = list({**dict(common), **dict(message["headers"])}.items())
            await send(message)

        await self._app(scope, receive, with_headers)


def json_response(value: Any, status: int = 200) -> Response:
    """Plain data as a response."""
    return Response(msgspec.json.encode(value), status, media_type=JSON[1].decode())


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
