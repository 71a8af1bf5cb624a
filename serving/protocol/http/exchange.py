"""One infer request of a connection, from its headers to its answer, without task or ASGI cycle."""

from __future__ import annotations

import logging
from typing import Protocol

from serving.calls import Answer, Call
from serving.errors import ServingError, TooLargeError
from serving.protocol.answers import encode_answer, encode_error
from serving.protocol.http.heads import refused
from serving.protocol.http.inferring import Asked, Front, Target, now

_log = logging.getLogger(__name__)


class Line(Protocol):
    """What an exchange needs of its connection."""

    def answer(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Write an answer and go on with what waits behind it."""

    def date(self) -> list[tuple[bytes, bytes]]:
        """Headers that every answer of the server has."""

    def resolve(self, exchange: Exchange) -> None:
        """Run `Exchange.resolve` beside the other requests."""


class Nothing:
    """Stands where uvicorn expects an event that somebody waits for; nobody does."""

    def set(self) -> None:
        """Nobody waits."""


NOBODY = Nothing()


class Exchange:
    """One infer request and its answer.

    The attributes that `RequestResponseCycle` of uvicorn has too are read by uvicorn's protocol.
    """

    __slots__ = (
        "arrived",
        "asked",
        "call",
        "chunks",
        "complete",
        "disconnected",
        "error",
        "expects_continue",
        "front",
        "headers",
        "keep_alive",
        "line",
        "message_event",
        "num_bytes",
        "request_id",
        "response_complete",
        "subject",
        "target",
    )

    def __init__(
        self,
        line: Line,
        front: Front,
        target: Target,
        headers: dict[bytes, bytes],
        keep_alive: bool,
    ) -> None:
        self.line = line
        self.front = front
        self.target = target
        self.headers = headers
        self.keep_alive = keep_alive
        self.response_complete = False
        self.disconnected = False
        self.message_event = NOBODY
        self.expects_continue = False
        self.arrived = now()
        self.request_id = front.ids.taken(headers.get(b"x-request-id"))
        self.subject = ""
        self.chunks: list[bytes] = []
        self.num_bytes = 0
        self.complete = False
        self.error: ServingError | None = None
        self.asked: Asked | None = None
        self.call: Call | None = None

    def add(self, chunk: bytes) -> bool:
        """Take a part of the body; False where it is too large and the rest is not wanted."""
        self.num_bytes += len(chunk)
        self.front.buffered += len(chunk)
        if self.error is None:
            self.chunks.append(chunk)
        most = self.front.config.http.max_body_bytes
        if self.num_bytes > most:
            self.error = too_large(self.num_bytes, most)
            return False
        return True

    def start(self) -> None:
        """Read the request, whose body is whole, and hand it to the engine."""
        try:
            self._start()
        except Exception:
            # A fault of ours: the client is told, and the other requests go on.
            _log.exception("a request to %s could not be taken", self.target.model)
            self.refuse(ServingError("this server has failed on the request"))

    def _start(self) -> None:
        body = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        self.drop_body()
        if self.error is not None:
            self.refuse(self.error)
            return
        try:
            self.asked = self.front.read(
                self.target, self.headers, body, self.subject, self.request_id, self.arrived
            )
        except ServingError as exc:
            self.refuse(exc)
            return
        self.call = self.asked.call
        if self.call.entities is None:
            self.front.engine.submit(self.call, self.done)
        else:
            self.line.resolve(self)

    async def resolve(self) -> None:
        """Read the features of a request by entities, and hand it to the engine."""
        assert self.call is not None
        try:
            await self.front.resolve(self.call)
        except ServingError as exc:
            self.refuse(exc)
            return
        self.front.engine.submit(self.call, self.done)

    def done(self, call: Call, outcome: Answer | ServingError) -> None:
        """Write what came of the call; nothing where the client has gone."""
        if self.disconnected:
            return
        if isinstance(outcome, ServingError):
            self._write_refusal(outcome)
            return
        try:
            self._write_answer(call, outcome)
        except Exception:
            # A fault of ours, which must not reach the engine: other calls are in its hands.
            _log.exception("an answer of %s could not be written", self.target.model)
            self._write_refusal(ServingError("this server has failed on the answer"))

    def _write_answer(self, call: Call, outcome: Answer) -> None:
        assert self.asked is not None
        parameters = None if call.entities is None else self.front.parameters_of(call)
        body, json_bytes = encode_answer(
            outcome, self.asked.wanted, self.asked.client_id, parameters
        )
        head = self.front.heads.answered(
            outcome.served,
            self.line.date(),
            self.request_id,
            len(body),
            json_bytes,
            self.keep_alive,
        )
        self.line.answer(self, head, body)

    def refuse(self, error: ServingError) -> None:
        """Write a refusal of a request that the engine never saw."""
        if self.target.model:
            self.front.tell_refused(self.call or self._unread(), error)
        if not self.disconnected:
            self._write_refusal(error)

    def _unread(self) -> Call:
        """The call of a request that could not be read, with the slot that was to answer it."""
        target = self.target
        slot = self.front.slot_meant(self.headers)
        return Call(
            target.model,
            {},
            0,
            self.request_id,
            target.version,
            slot,
            self.subject,
            arrived=self.arrived,
        )

    def gone(self) -> None:
        """The client has closed its connection."""
        self.disconnected = True
        self.drop_body()
        if self.call is not None:
            self.call.is_gone = True

    def drop_body(self) -> None:
        """Forget the body; its bytes are no longer counted."""
        if self.num_bytes:
            self.front.buffered -= self.num_bytes
            self.num_bytes = 0
        self.chunks.clear()

    def _write_refusal(self, error: ServingError) -> None:
        body = encode_error(str(error))
        head = refused(error, self.line.date(), self.request_id, len(body), self.keep_alive)
        self.line.answer(self, head, body)


def too_large(num_bytes: int, most: int) -> TooLargeError:
    """Why a body is not taken."""
    return TooLargeError(
        f"the body has {num_bytes} bytes or more; this server takes {most} at most "
        "(http.max_body_bytes)"
    )
