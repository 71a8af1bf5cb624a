"""Pages of the admin listener: slots, loading, states, metrics. A token opens all of them."""

from __future__ import annotations

import base64
import hmac
import os
import secrets
from pathlib import Path

import msgspec

from serving.errors import BadRequestError, UnauthorizedError
from serving.interfaces import Pages
from serving.protocol.http.inferring import Front
from serving.protocol.http.pages import (
    Application,
    Page,
    Reply,
    Request,
    Route,
    decoded,
    json_reply,
)
from serving.protocol.metadata import admin_state, refuse_unknown, repository_index, version_state
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import private_folder, write_atomically

TOKEN_FILE = Path("serving") / "secrets" / "admin-token"


class Slots(msgspec.Struct, forbid_unknown_fields=True):
    """Versions of slots; one that is not named stays as it is, null empties it."""

    stable: str | msgspec.UnsetType | None = msgspec.UNSET
    candidate: str | msgspec.UnsetType | None = msgspec.UNSET
    shadow: str | msgspec.UnsetType | None = msgspec.UNSET


class VersionNamed(msgspec.Struct, forbid_unknown_fields=True):
    """A version; null for what the registry's alias names, or for all."""

    version: str | None = None


class AdminPages:
    """What the release flow and people change in a running process."""

    def __init__(self, front: Front, token: str, extra: Pages) -> None:
        self._engine = front.engine
        self._ids = front.ids
        self._token = token.encode()
        self._extra = extra

    def application(self) -> Application:
        """The pages, routed."""
        model = "/admin/models/{model}"
        routes = [
            ("GET", "/admin/models", self.models),
            ("GET", model, self.model),
            ("POST", model + "/slots", self.set_slots),
            ("POST", model + "/load", self.load),
            ("POST", model + "/unload", self.unload),
            *(("GET", path, self._shown(path)) for path in self._extra),
        ]
        return Application(
            [Route(method, path, self._guarded(page)) for method, path, page in routes],
            self._ids,
            for_browsers=True,
        )

    def _guarded(self, page: Page) -> Page:
        async def guarded(request: Request) -> Reply:
            self._admit(request)
            return await page(request)

        return guarded

    def _admit(self, request: Request) -> None:
        sent = next((v for name, v in request.headers if name == b"authorization"), b"")
        kind, _, presented = sent.partition(b" ")
        token = presented.strip()
        if kind.lower() == b"basic" and request.method == "GET":
            token = _password(token)
        elif kind.lower() != b"bearer":
            token = b""
        if not hmac.compare_digest(token, self._token):
            raise UnauthorizedError(
                f"the admin interface takes `Authorization: Bearer` with the token of {TOKEN_FILE} "
                "in the state folder; a browser that looks at a page gives it as the password"
            )

    def _shown(self, path: str) -> Page:
        async def shown(request: Request) -> Reply:
            content_type, body = self._extra[path]()
            # Such a page may have scripts, and says itself which.
            policy = ((b"content-security-policy", b"frame-ancestors 'none'"),)
            return Reply(body, content_type=content_type.encode(), headers=policy)

        return shown

    async def models(self, request: Request) -> Reply:
        """All versions of all models."""
        return json_reply(repository_index(self._engine, only_ready=False))

    async def model(self, request: Request) -> Reply:
        """Slots and versions of a model."""
        return json_reply(admin_state(self._engine, request.names["model"]))

    async def set_slots(self, request: Request) -> Reply:
        """Say which version each slot means, all at once."""
        name = request.names["model"]
        told = msgspec.structs.asdict(decoded(request.body, Slots))
        slots = {slot: version for slot, version in told.items() if version is not msgspec.UNSET}
        if not slots:
            raise BadRequestError('name a slot at least, as {"stable": "3", "candidate": null}')
        await self._engine.set_slots(name, slots)  # type: ignore[arg-type]
        return json_reply(admin_state(self._engine, name))

    async def load(self, request: Request) -> Reply:
        """Load a version, check it, make it ready."""
        asked = decoded(request.body, VersionNamed)
        state = await self._engine.load(request.names["model"], asked.version)
        return json_reply(version_state(state))

    async def unload(self, request: Request) -> Reply:
        """Take a version, or all, out of service."""
        asked = decoded(request.body, VersionNamed)
        name = request.names["model"]
        refuse_unknown(self._engine, name, asked.version)
        await self._engine.unload(name, asked.version)
        return json_reply({"name": name, "unloaded": True})


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
