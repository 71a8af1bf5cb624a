"""Servers beside a bench, what they cost, and clients that ask them."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil
import uvloop

from tasks.kernel.process import guarded_process, wait_until_ready
from tasks.kernel.settings import PROJECT_ROOT

START_LIMIT_S = 180
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
NextIn = Callable[[bytes], float | None]
"""Takes an answer's head and gives the seconds until the next request; None ends its connection."""


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    is_ready: Callable[[], object],
    environment: Mapping[str, str] | None = None,
    folder: Path = PROJECT_ROOT,
) -> Iterator[psutil.Process]:
    """The guard of a process, once that is ready; all that it started ends with the block.

    Raises:
        TransientError: it ended before, or took too long.
    """
    variables = {**os.environ, **(environment or {})}
    with guarded_process(command, log, variables, folder=folder, grace_s=20) as process:
        wait_until_ready(process, lambda: bool(is_ready()), f"{command}", log, START_LIMIT_S)
        yield psutil.Process(process.pid)


def listens(port: int) -> bool:
    """Whether a process of this machine listens on a port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def cpu_us(
    processes: Sequence[psutil.Process],
    port: int,
    request: bytes,
    connections: int,
    seconds: float,
    *,
    tls: bool = False,
) -> list[float]:
    """CPU microseconds of a request in each process and all below it, every thread."""
    before = [_cpu_ns(process) for process in processes]
    answered = load(port, request, connections, seconds, tls=tls)
    spent = [_cpu_ns(process) - was for process, was in zip(processes, before, strict=True)]
    return [ns / answered / 1e3 for ns in spent]


def _cpu_ns(process: psutil.Process) -> int:
    total = 0
    for one in (process, *process.children(recursive=True)):
        for task in Path(f"/proc/{one.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total


def load(port: int, request: bytes, connections: int, seconds: float, *, tls: bool = False) -> int:
    """Ask over and over for so long, each connection after its answer; how many were answered.

    Raises:
        RuntimeError: an answer was not a 200, or a connection was closed.
    """
    answered, until = 0, time.monotonic() + seconds

    def next_in(head: bytes) -> float | None:
        nonlocal answered
        answered += 1
        return 0.0 if time.monotonic() < until else None

    uvloop.run(ask([request] * connections, port, next_in, tls=tls))
    return answered


async def ask(requests: Sequence[bytes], port: int, next_in: NextIn, *, tls: bool = False) -> None:
    """Send each request on a connection of its own, again and again, until `next_in` ends it."""
    context = None
    if tls:  # no certificate is checked
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    loop = asyncio.get_running_loop()
    clients = []
    for request in requests:
        client = _Client(request, next_in)
        await loop.create_connection(lambda c=client: c, "127.0.0.1", port, ssl=context)
        clients.append(client)
    await asyncio.gather(*[client.ended for client in clients])


class _Client(asyncio.Protocol):
    """Sends one request, and again when the answer to the one before is whole."""

    def __init__(self, request: bytes, next_in: NextIn) -> None:
        self._request, self._next_in = request, next_in
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Look whether the answer is whole."""
        self._received += data
        head, split, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head) if split else None
        if split and (length is None or not head.startswith(b"HTTP/1.1 200")):
            self._end(RuntimeError(f"expected 200 and a length: {self._received[:200]!r}"))
        elif length is not None and len(body) >= int(length[1]):
            self._received = b""
            wait_s = self._next_in(head.lower())
            if wait_s is None:
                self._end(None)
            elif wait_s:
                self._loop.call_later(wait_s, self._transport.write, self._request)
            else:
                self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        """See that nobody waits for it any more."""
        self._end(exc or RuntimeError("the server has closed a connection"))

    def _end(self, error: Exception | None) -> None:
        self._transport.close()
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
