"""A small server of the v2 protocol: it says what it was asked, and lets in whom its guard does."""

import asyncio
import json
import re
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2_grpc
from open_inference.grpc.protocol import ModelInferRequest, ModelInferResponse

from infra.bench.parts import wait_until
from serving.errors import ServingError
from serving.interfaces import Action
from serving.protocol.answers import refusal_headers
from serving.security.config import SecurityConfig
from serving.security.guard import SecurityGuard
from serving.security.tls import grpc_credentials, server_context

MODEL_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?(/infer)?")
SERVICE = "inference.GRPCInferenceService"


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    path: str
    headers: Mapping[str, str]
    num_bytes: int

    @property
    def track(self) -> str:
        """That the gateway chose."""
        return self.headers.get("x-falaj-slot", "")


class Upstream:
    """Serves in threads of this process until it is stopped; can be started again."""

    def __init__(self, http_port: int, grpc_port: int, security: SecurityConfig) -> None:
        self.http_port, self.grpc_port, self.security = http_port, grpc_port, security
        self.seen: deque[Seen] = deque(maxlen=20_000)
        self.fail_with: int | None = None
        self.is_held = False

    def start(self) -> None:
        """Listen on both ports."""
        self._guard = SecurityGuard(self.security)
        tls = self.security.tls
        config = uvicorn.Config(
            self,
            host="127.0.0.1",
            port=self.http_port,
            log_level="error",
            lifespan="off",
            loop="asyncio",
            timeout_keep_alive=75,
            ssl_context_factory=(lambda *_: server_context(tls)) if tls else None,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self._server.started, "the upstream listens")
        self._start_grpc()

    def stop(self) -> None:
        """Close both ports."""
        self._server.should_exit = self._server.force_exit = True
        self._grpc.stop(0).wait()
        self._thread.join()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one HTTP request."""
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        while self.is_held and scope["path"].endswith("/infer"):
            await asyncio.sleep(0.02)
        headers = {k.decode(): v.decode("latin-1") for k, v in scope["headers"]}
        seen = Seen(scope["path"], headers, len(body))
        status, answer, extra = self._answer(scope, seen)
        if not scope["path"].startswith("/v2/health"):
            self.seen.append(seen)
        start = {"type": "http.response.start", "status": status}
        kind = (b"content-type", b"application/json")
        await send(start | {"headers": [kind, (b"x-falaj-version", b"7"), *extra]})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _answer(self, scope: Any, seen: Seen) -> tuple[int, Any, list[tuple[bytes, bytes]]]:
        if self.fail_with is not None:
            return self.fail_with, {"error": "told to fail"}, []
        match = MODEL_PATH.match(seen.path)
        if match is None:
            return 200, {"path": seen.path}, []
        try:
            action: Action = "infer" if match[2] else "read"
            client = scope["client"][0]
            principal = self._guard.admit(scope["headers"], client, action, match[1])
        except ServingError as exc:
            return int(exc.status), {"error": str(exc)}, refusal_headers(exc)[1:]
        found = {"model_name": match[1], "slot": seen.track, "subject": principal.subject}
        return 200, found | {"headers": dict(seen.headers)}, []

    def _start_grpc(self) -> None:
        def infer(request: Any, context: grpc.ServicerContext) -> Any:
            headers = {str(k): str(v) for k, v in context.invocation_metadata()}
            self.seen.append(Seen("grpc:" + request.model_name, headers, request.ByteSize()))
            track = headers.get("x-falaj-slot", "")
            return ModelInferResponse(model_name=request.model_name, id=track)

        handler = grpc.unary_unary_rpc_method_handler(
            infer, ModelInferRequest.FromString, ModelInferResponse.SerializeToString
        )
        methods = grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": handler})
        self._grpc = grpc.server(ThreadPoolExecutor(4), handlers=[methods])
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), self._grpc)
        tls = self.security.tls
        address = f"127.0.0.1:{self.grpc_port}"
        if tls is None or tls.client_ca is None:
            self._grpc.add_insecure_port(address)
        else:
            self._grpc.add_secure_port(address, grpc_credentials(tls))
        self._grpc.start()
