"""One connection: HTTP/1.1, one request at a time, each answered before the next is read.

    bytes -> head (`framing.py`) -> guard -> body -> engine -> one write
                                               '--> pages (ASGI) -> one write

A request for answers of a model goes to the engine in the turn of the event loop in which its last
byte comes. Any other is given whole to an ASGI application, whose answer is sent whole. What a
client sends ahead is kept up to a bound; then nothing more is read of it.
"""

import asyncio
import math
from collections.abc import Generator
from functools import partial

from starlette.types import ASGIApp

from serving.config import MAX_BUFFERED_BYTES
from serving.errors import OverloadedError, RequestTimeoutError, ServingError
from serving.interfaces import Answer, Call
from serving.protocol.answers import Response, encode_answer, encode_refusal, known_error
from serving.protocol.front import Front, infer_target, now
from serving.protocol.http.framing import Head, check_size, read_chunks, read_head
from serving.protocol.http.pages import ask
from serving.protocol.plans import Wanted

LINGER_S = 2.0
"""Time for a refused client to read why: closing a socket with unread data drops the answer."""
MOST_ASIDE = 65_536
"""Bytes of the body for a page; of a refused request's, thrown away to keep the connection; and of
what a client may send while it is answered, before reading stops."""
_LAST = b"connection: close\r\nx-envoy-immediate-health-check-fail: true\r\n"
"""Of each answer once the process is to end: Envoy sends it nothing more from then on."""
_ANSWERED = 100
"""Connections past the bound that get an answer saying so; further ones are closed at once."""


class Connections:
    """What the connections to one address share.

    Args:
        pages: ASGI application for all that is not for answers of models.
        answers_models: whether such requests are taken.

    Attributes:
        date: header of every answer.
    """

    def __init__(self, front: Front, pages: ASGIApp, answers_models: bool) -> None:
        self.front = front
        self.pages = pages
        self.answers_models = answers_models
        self.connections: set[Connection] = set()
        self.date = b""


class Connection(asyncio.Protocol):
    """One connection of a listener."""

    def __init__(self, listener: Connections) -> None:
        self.transport: asyncio.Transport
        self._listener, self._front = listener, listener.front
        self._limits = listener.front.config.http
        self._address = ""
        self._state = "idle"
        """Or `arriving` while a request has begun and is not whole, `answering`, `ended`."""
        self._deadline = now() + self._limits.keep_alive_s
        """Of the state; see `sweep`."""
        self._write_deadline = math.inf
        """For a client that does not read what it is sent."""
        self._rest, self._body = bytearray(), bytearray()
        """Received, and not read; of a body in chunks, what was read."""
        self._num_held = 0
        self._reading = self._read_requests()
        self._head: Head
        self._call: Call | None = None
        """The request whose head is read and whose answer is not sent; without a model, a page."""
        self._wanted: tuple[Wanted, str]
        """How its output is sent, and its client's own name of it."""

    # Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless too many are open."""
        self.transport = transport
        self._address = str((transport.get_extra_info("peername") or [""])[0])
        self._listener.connections.add(self)
        most, num_open = self._limits.max_connections, len(self._listener.connections)
        if num_open > most + _ANSWERED:
            transport.abort()
        elif num_open > most:
            busy = f"{most} connections are open (http.max_connections)"
            self._refuse(OverloadedError(busy, 1.0), is_last=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the request under way: nobody reads its answer."""
        self._listener.connections.discard(self)
        if self._call is not None:
            self._call.is_gone = True
        self._end()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        self._write_deadline = now() + self._limits.request_timeout_s

    def resume_writing(self) -> None:
        """The client has read on."""
        self._write_deadline = math.inf
        self._read_on()

    def data_received(self, data: bytes) -> None:
        """Read a request, or keep the bytes until the one before it is answered."""
        if self._state == "ended":
            return
        self._rest += data
        self._advance()
        if len(self._rest) > MOST_ASIDE and self._state != "arriving":
            self.transport.pause_reading()

    def sweep(self, at: float) -> None:
        """Close the connection if it is past one of its times."""
        if at < min(self._deadline, self._write_deadline):
            return
        if self._state == "arriving" and at < self._write_deadline:
            late = f"the request did not arrive whole within {self._limits.request_timeout_s:g} s"
            self._refuse(RequestTimeoutError(late), is_last=True)
        elif self.transport.is_closing() or at >= self._write_deadline:
            self.transport.abort()
        else:  # closes once the client has read what was sent
            self.transport.close()
            self._deadline = at + self._limits.request_timeout_s

    def close_if_idle(self) -> None:
        """Close where no request has its head here; at the listener's end."""
        if self._call is None and self._state != "ended":
            self.transport.close()

    def _enter(self, state: str, seconds: float) -> None:
        self._state, self._deadline = state, now() + seconds

    # Reading

    def _advance(self) -> None:
        """Read as far as the bytes go, until a request is to be answered."""
        if self._state in ("answering", "ended") or self._write_deadline < math.inf:
            return
        try:
            next(self._reading, None)
            self._hold()
        except ServingError as error:
            self._refuse(error, is_last=True)

    def _read_requests(self) -> Generator[None, None, None]:
        """One request after another, each once the one before it is answered."""
        while True:
            while not self._rest.lstrip(b"\r\n"):
                yield
            self._enter("arriving", self._limits.request_timeout_s)
            self._rest = self._rest.lstrip(b"\r\n")
            head = self._head = yield from read_head(self._rest)
            call = self._call = self._call_of(head)
            most = self._limits.max_body_bytes if call.model else MOST_ASIDE
            error = None
            try:  # what is refused is known before its body is there
                if call.model:
                    self._front.admit(call, head.headers, head.found, self._address)
                check_size(head.length or 0, most)
            except Exception as exc:
                error = known_error(exc)
            if error is not None:
                if head.waits or head.length is None or head.length > MOST_ASIDE:
                    raise error
            elif head.waits and head.length != 0 and not self._rest:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if head.length is None:
                yield from read_chunks(self._rest, self._body, most)
                body, self._body = bytes(self._body), bytearray()
            else:
                while len(self._rest) < head.length:
                    yield
                body = bytes(self._rest[: head.length])
                del self._rest[: head.length]
            self._enter("answering", math.inf)
            if error is not None:
                self._refuse(error)
            elif call.model:
                self._infer(head, call, body)
            else:
                asked = head, self._address, body, call.request_id
                self._front.start(ask(self._listener.pages, *asked, partial(self._answer, call)))
            yield

    def _call_of(self, head: Head) -> Call:
        is_post = head.method == b"POST" and self._listener.answers_models
        name, version = (infer_target(head.target) if is_post else None) or ("", None)
        request_id = self._front.ids.accepted(head.found.get(b"x-request-id"))
        return Call(name, {}, 0, request_id, version)

    def _hold(self) -> None:
        """Count the bytes that are kept, of all connections together.

        Raises:
            OverloadedError: they are too many for one more request.
        """
        held = len(self._rest) + len(self._body)
        self._front.buffered += held - self._num_held
        self._num_held = held
        if self._state == "arriving" and self._front.buffered > MAX_BUFFERED_BYTES:
            raise OverloadedError("bodies being received fill the memory for them", 1.0)

    def _read_on(self) -> None:
        self.transport.resume_reading()
        if self._rest:  # in a turn of its own: many requests that were sent ahead are no recursion
            asyncio.get_running_loop().call_soon(self._advance)

    def _end(self) -> None:
        """Forget what is kept, and the request under way; nothing more is read."""
        self._rest, self._body, self._call = bytearray(), bytearray(), None
        self._enter("ended", LINGER_S)
        self._hold()

    # Answers

    def _infer(self, head: Head, call: Call, body: bytes) -> None:
        try:
            self._wanted = self._front.read(call, head.found, body)
            self._front.submit(call, self._computed)
        except Exception as error:
            self._refuse(error)

    def _computed(self, call: Call, outcome: Answer | ServingError) -> None:
        try:
            if isinstance(outcome, ServingError):
                raise outcome
            wanted, client_id = self._wanted
            parameters = self._front.parameters_of(call)
            response = encode_answer(outcome, wanted, call.request_id, client_id, parameters)
        except Exception as error:  # must not reach the engine: it has other calls in its hands
            response = encode_refusal(error, call.request_id)
        self._answer(call, response)

    def _refuse(self, error: Exception, is_last: bool = False) -> None:
        """Refuse what the engine has not seen; the rest it reports itself."""
        call, known = self._call, known_error(error)
        if call is not None and call.model:
            self._front.report_refused(call, known)
        self._answer(call, encode_refusal(known, call.request_id if call else ""), is_last)

    def _answer(self, call: Call | None, response: Response, is_last: bool = False) -> None:
        """Send an answer, then read on; or throw away what still comes, until the client closes.

        Args:
            is_last: nothing that follows is read.
        """
        if self._call is not call:  # the client has gone
            return
        (head, body), date = response, self._listener.date
        closes = is_last or self._front.stopping or self._head.is_last
        close = _LAST if self._front.stopping else b"connection: close\r\n" if closes else b""
        head = b"%s%scontent-length: %d\r\n%s\r\n" % (head, date, len(body), close)
        is_head = call is not None and self._head.method == b"HEAD"
        self.transport.write(head if is_head else head + body)
        if not closes:
            self._call = None
            self._enter("idle", self._limits.keep_alive_s)
            self._read_on()
            return
        self._end()
        self._read_on()
        end = self.transport.write_eof if self.transport.can_write_eof() else self.transport.close
        end()
