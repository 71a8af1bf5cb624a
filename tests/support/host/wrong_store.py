"""A proxy before an S3 service that makes it slow and wrong, as stores and networks are.

It passes requests on unchanged, so their signatures hold.
"""

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class WrongStore(ThreadingHTTPServer):
    """What is wrong with it at the moment.

    Attributes:
        delay_s: before each answer.
        busy: so many of the next requests are answered with 503.
        cuts: so many of the next uploads break off in the middle.
        breaks: so many of the next answers with content break off in the middle.
        sent_bytes: of the bodies of all answers.
        old_listings: a listing is answered as it was when it was first asked for.
        unconditional: it takes each write that should have been refused.
    """

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(endpoint).netloc
        self.delay_s, self.busy, self.cuts, self.breaks, self.sent_bytes = 0.0, 0, 0, 0, 0
        self.old_listings = self.unconditional = False
        self.listings: dict[str, tuple[int, dict[str, str], bytes]] = {}

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WrongStore

    def _pass_on(self) -> None:
        store, body = self.server, b""
        if length := int(self.headers.get("Content-Length") or 0):
            body = self.rfile.read(length)
        time.sleep(store.delay_s)
        if store.busy:
            store.busy -= 1
            self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        if self.command == "PUT" and store.cuts:
            store.cuts -= 1
            self.close_connection = True
            return
        if self.command == "PUT" and store.unconditional and self.headers.get("If-None-Match"):
            self._answer(200, {"ETag": '"0"'}, b"")
            return
        if store.old_listings and "list-type=2" in self.path and self.path in store.listings:
            self._answer(*store.listings[self.path])
            return
        found = self._asked(body)
        if "list-type=2" in self.path:
            store.listings[self.path] = found
        self._answer(*found)

    def _asked(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        reply = connection.getresponse()
        kept = {n: v for n, v in reply.getheaders() if n.lower() not in _OF_CONNECTION}
        if self.command == "HEAD":
            kept["Content-Length"] = reply.getheader("Content-Length") or "0"
        content = reply.read()
        connection.close()
        return reply.status, kept, content

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET" and content and self.server.breaks:
            self.server.breaks -= 1
            content, self.close_connection = content[: len(content) // 2], True
        if self.command != "HEAD":
            self.server.sent_bytes += len(content)
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


_OF_CONNECTION = ("content-length", "transfer-encoding", "connection", "date", "server")


@contextmanager
def wrong_store(endpoint: str) -> Iterator[WrongStore]:
    """A proxy with which nothing is wrong yet."""
    with WrongStore(endpoint) as store:
        thread = threading.Thread(target=store.serve_forever, daemon=True)
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join(10)
