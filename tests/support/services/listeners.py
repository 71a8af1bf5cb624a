"""Real listeners on the loopback device for what a platform tells people: HTTP and SMTP."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def webhook_listener(path: str = "alert") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Takes JSON by POST; yields its address and the list that what came is put in."""
    came: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == f"/{path}"
            length = int(self.headers["Content-Length"])
            came.append(json.loads(self.rfile.read(length)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}/{path}", came


@contextmanager
def mail_listener() -> Iterator[tuple[int, list[Message]]]:
    """Takes mail by SMTP, without a password; yields its port and the list of what came."""
    came: list[Message] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self._say("220 listener")
            while line := self.rfile.readline().decode().strip():
                word = line.split(maxsplit=1)[0].upper()
                if word == "DATA":
                    self._say("354 go on")
                    came.append(message_from_bytes(b"".join(iter(self.rfile.readline, b".\r\n"))))
                if word == "QUIT":
                    self._say("221 bye")
                    return
                self._say("250 listener" if word == "EHLO" else "250 ok")

        def _say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

    with _serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as port:
        yield port, came


@contextmanager
def _serving(server: socketserver.TCPServer) -> Iterator[int]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
