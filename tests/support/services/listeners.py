"""Real listeners on the loopback device, whose answers a test gives: HTTP and SMTP.

And clients over TLS, of servers whose authority a test has.
"""

import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True)
class Asked:
    """One request, whole."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Answer = tuple[int, str, bytes]
"""Status, content type and body; of a redirect, the address that it leads to."""


def json_answer(value: Any, status: int = 200) -> Answer:
    return status, "application/json", json.dumps(value).encode()


@contextmanager
def http_listener(answer: Callable[[Asked], Answer], lacking: int = 0) -> Iterator[str]:
    """Answers GET and POST by a function, each in a thread; yields its address.

    Every answer ends `lacking` bytes before the length that it names.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = Asked(self.command, self.path, self.headers, self._body())
            status, kind, body = answer(asked)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body) + lacking))
            self.send_header("connection", "close")
            if 300 <= status < 400:
                self.send_header("location", body.decode())
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def _body(self) -> bytes:
            if "transfer-encoding" not in self.headers:
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *said: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    with _serving(Server(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def webhook_listener(path: str = "alert") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Takes JSON by POST; yields its address and the list that what came is put in."""
    came: list[dict[str, Any]] = []

    def answer(asked: Asked) -> Answer:
        assert asked.path == f"/{path}"
        came.append(json.loads(asked.body))
        return 200, "text/plain", b""

    with http_listener(answer) as url:
        yield f"{url}/{path}", came


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


def https_client(
    url: str, authority: Path, certificate: Any = None, **options: Any
) -> httpx.Client:
    """A client of one server, with a certificate of its own where one is given."""
    context = ssl.create_default_context(cafile=authority)
    if certificate is not None:
        context.load_cert_chain(certificate.certificate, certificate.key)
    return httpx.Client(base_url=url, verify=context, timeout=60, **options)


@contextmanager
def tls_connection(port: int, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    """A connection to a port of this machine, from the handshake on."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        yield secure
