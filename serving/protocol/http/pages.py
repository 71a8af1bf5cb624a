"""A small ASGI application: pages by path and method, each refusal with a sentence."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

from serving.errors import BadRequestError, ServingError, TooLargeError, UnauthorizedError
from serving.protocol.answers import encode_error
from serving.protocol.http.errors import NoSuchPageError, WrongMethodError
from serving.protocol.http.heads import JSON, SECURITY_HEADERS, refusal_headers
from serving.protocol.http.inferring import RequestIds

Asked = TypeVar("Asked", bound=msgspec.Struct)
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
MOST_BODY = 65_536
"""Bytes of a request that is not for answers of a model."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a page is asked."""

    method: str
    headers: Sequence[tuple[bytes, bytes]]
    address: str
    names: Mapping[str, str]
    """Parts of the path that stand for something."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a page says."""

    body: bytes = b""
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


Page = Callable[[Request], Awaitable[Reply]]


@dataclass(frozen=True)
class Route:
    """A page and the method that asks for it; `{name}` in the path stands for one part of it."""

    method: str
    path: str
    page: Page
    pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        parts = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]{1,300})", re.escape(self.path))
        object.__setattr__(self, "pattern", re.compile(parts))


def json_reply(value: Any, status: int = 200) -> Reply:
    """A reply in JSON."""
    return Reply(msgspec.json.encode(value), status)


def decoded(body: bytes, kind: type[Asked]) -> Asked:
    """What a body asks for; an empty one stands for all defaults.

    Raises:
        BadRequestError: it is not of that kind.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequestError(f"the body is not what is taken here: {exc}") from exc


class Application:
    """Routes requests to pages."""

    def __init__(
        self, routes: Sequence[Route], ids: RequestIds, for_browsers: bool = False
    ) -> None:
        """Args: for_browsers: let a browser ask for a password where nobody is known."""
        self._routes = tuple(routes)
        self._ids = ids
        self._for_browsers = for_browsers

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        sent = next((v for name, v in scope["headers"] if name == b"x-request-id"), None)
        request_id = self._ids.taken(sent)
        try:
            reply = await self._reply(scope, receive)
        except ServingError as error:
            reply = _refusal(error, request_id, self._for_browsers)
        else:
            if reply is None:
                return
            extra = (*SECURITY_HEADERS, (b"x-request-id", request_id.encode()))
            headers = ((b"content-type", reply.content_type), *extra, *reply.headers)
            named = dict(headers)  # a page's own policy goes before the common one
            reply = Reply(reply.body, reply.status, b"", tuple(named.items()))
        await _send(reply, scope["method"] == "HEAD", send)

    async def _reply(self, scope: Message, receive: Receive) -> Reply | None:
        path = scope["raw_path"].decode("latin-1")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        route, names = self._route(method, path)
        body = b"" if method == "GET" else await _body(receive)
        if body is None:
            return None
        client = scope.get("client")
        address = client[0] if client else ""
        return await route.page(Request(method, scope["headers"], address, names, body))

    def _route(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        allowed: list[str] = []
        for route in self._routes:
            match = route.pattern.fullmatch(path)
            if match is None:
                continue
            if route.method == method:
                return route, {name: unquote(value) for name, value in match.groupdict().items()}
            allowed += ["GET", "HEAD"] if route.method == "GET" else [route.method]
        if not allowed:
            raise NoSuchPageError(f"nothing is at {path[:200]}; GET /openapi.json tells what is")
        raise WrongMethodError(
            f"{path[:200]} takes {' and '.join(allowed)}, not {method[:20]}", ", ".join(allowed)
        )


def _refusal(error: ServingError, request_id: str, for_browsers: bool) -> Reply:
    headers = refusal_headers(error, request_id)
    if for_browsers and isinstance(error, UnauthorizedError):
        headers.append((b"www-authenticate", b'Basic realm="falaj admin", charset="UTF-8"'))
    if isinstance(error, WrongMethodError):
        headers.append((b"allow", error.allowed.encode()))
    return Reply(encode_error(str(error)), error.status, b"", tuple(headers))


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None where the client has gone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BODY:
            raise TooLargeError(f"the body has more than {MOST_BODY} bytes, which none needs here")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _send(reply: Reply, is_head: bool, send: Send) -> None:
    headers = [*reply.headers, (b"content-length", b"%d" % len(reply.body))]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if is_head else reply.body})
