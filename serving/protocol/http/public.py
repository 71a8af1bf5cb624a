"""Pages of the public listener: all of the Open Inference Protocol but the answers themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from serving.errors import BadRequestError
from serving.interfaces import Action
from serving.protocol.http.inferring import Front
from serving.protocol.http.openapi import DOCS_POLICY, docs_html, document
from serving.protocol.http.pages import Application, Reply, Request, Route, decoded, json_reply
from serving.protocol.metadata import (
    model_metadata,
    refuse_unknown,
    repository_index,
    server_metadata,
    version_state,
)


class IndexRequest(msgspec.Struct):
    """What of the repository is asked for."""

    ready: bool = False


class LoadParameters(msgspec.Struct):
    """Which version to load or unload; all of them, or what the registry names, without."""

    version: str | None = None


class LoadRequest(msgspec.Struct):
    """A request to load or unload."""

    parameters: LoadParameters = msgspec.field(default_factory=LoadParameters)


class PublicPages:
    """Health, metadata and repository of one process."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._engine = front.engine

    def application(self) -> Application:
        """The pages, routed."""
        model = "/v2/models/{model}"
        both = (model, model + "/versions/{version}")
        routes = [
            Route("GET", "/v2", self.server),
            Route("GET", "/v2/health/live", self.live),
            Route("GET", "/v2/health/ready", self.ready),
            *(Route("GET", path, self.metadata) for path in both),
            *(Route("GET", path + "/ready", self.model_ready) for path in both),
            *(Route("POST", path + "/infer", self.never) for path in both),
            Route("POST", "/v2/repository/index", self.index),
            Route("POST", "/v2/repository/models/{model}/load", self.load),
            Route("POST", "/v2/repository/models/{model}/unload", self.unload),
            Route("GET", "/openapi.json", self.openapi),
            Route("GET", "/v2/docs", self.docs),
        ]
        return Application(routes, self._front.ids)

    def _admit(self, request: Request, action: Action, model: str | None = None) -> None:
        self._front.guard.admit(request.headers, request.address, action, model)

    async def live(self, request: Request) -> Reply:
        """Whether the process answers. Asked without credentials, by whatever watches it."""
        return json_reply({"live": True})

    async def ready(self, request: Request) -> Reply:
        """Whether all models answer. Asked without credentials too."""
        ready = not self._front.stopping and self._engine.is_ready()
        return json_reply({"ready": ready}, 200 if ready else 503)

    async def server(self, request: Request) -> Reply:
        """Name, version and extensions of the server."""
        self._admit(request, "read")
        return json_reply(server_metadata())

    async def metadata(self, request: Request) -> Reply:
        """Tensors and versions of a model."""
        name, version = request.names["model"], request.names.get("version")
        self._admit(request, "read", name)
        return json_reply(model_metadata(self._engine, name, version))

    async def model_ready(self, request: Request) -> Reply:
        """Whether a model, or a version, answers; where not, why."""
        name, version = request.names["model"], request.names.get("version")
        self._admit(request, "read", name)
        refuse_unknown(self._engine, name, version)
        ready = not self._front.stopping and self._engine.is_ready(name, version)
        told: dict[str, Any] = {"name": name, "ready": ready}
        if not ready:
            states = [s for s in self._engine.states() if s.name == name]
            reasons = [s.reason for s in states if version in (None, s.version) and s.reason]
            told["reason"] = "; ".join(reasons)
        return json_reply(told, 200 if ready else 503)

    async def never(self, request: Request) -> Reply:
        """Say of which method an infer path is; requests for answers do not come this way."""
        raise BadRequestError(f"model {request.names['model']!r} is no name that can be asked")

    async def index(self, request: Request) -> Reply:
        """All versions of all models."""
        self._admit(request, "admin")
        asked = decoded(request.body, IndexRequest)
        return json_reply(repository_index(self._engine, asked.ready))

    async def load(self, request: Request) -> Reply:
        """Load what the registry names, or a version."""
        name = request.names["model"]
        self._admit(request, "admin", name)
        asked = decoded(request.body, LoadRequest)
        state = await self._engine.load(name, asked.parameters.version)
        return json_reply({"name": name, **version_state(state)})

    async def unload(self, request: Request) -> Reply:
        """Take a model, or a version, out of service."""
        name = request.names["model"]
        self._admit(request, "admin", name)
        asked = decoded(request.body, LoadRequest)
        refuse_unknown(self._engine, name, asked.parameters.version)
        await self._engine.unload(name, asked.parameters.version)
        return json_reply({"name": name, "unloaded": True})

    async def openapi(self, request: Request) -> Reply:
        """The description of all this for programs."""
        self._admit(request, "read")
        return json_reply(document())

    async def docs(self, request: Request) -> Reply:
        """The description of all this for people."""
        self._admit(request, "read")
        policy = ((b"content-security-policy", DOCS_POLICY),)
        return Reply(docs_html(), content_type=b"text/html; charset=utf-8", headers=policy)
