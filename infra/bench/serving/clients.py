"""Clients that ask a server over HTTP, and what their requests cost it."""

import asyncio
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r", re.IGNORECASE)
Answers = list[tuple[float, bytes]]
NextIn = Callable[[bytes], float | None]
"""Takes an answer's head and gives the seconds until the next request; None ends its connection."""


def request(model: str, body: bytes, token: str = "") -> bytes:
    """A request for a model, as it goes over the wire with the headers of usual clients."""
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "host: localhost",
        "user-agent: falaj-bench",
        "accept: */*",
        *([f"authorization: Bearer {token}"] if token else []),
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def cpu_us(
    processes: Sequence[psutil.Process],
    port: int,
    request: bytes,
    connections: int,
    seconds: float,
    *,
    tls: bool = False,
) -> list[float]:
    """CPU microseconds of a request in each process and all below it, every thread.

    Each connection asks over and over for so long, as soon as it has its answer.
    """
    before = [_cpu_ns(process) for process in processes]
    answered, until = 0, time.monotonic() + seconds

    def next_in(head: bytes) -> float | None:
        nonlocal answered
        answered += 1
        return 0.0 if time.monotonic() < until else None

    uvloop.run(ask([request] * connections, port, next_in, tls=tls))
    spent = [_cpu_ns(process) - was for process, was in zip(processes, before, strict=True)]
    return [ns / answered / 1e3 for ns in spent]


def _cpu_ns(process: psutil.Process) -> int:
    total = 0
    for one in (process, *process.children(recursive=True)):
        for task in Path(f"/proc/{one.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total


@contextmanager
def load(requests: Sequence[bytes], port: int, per_s: float) -> Iterator[Answers]:
    """Clients that ask over TLS without end, each on a connection of its own, so often in all.

    Yields:
        Moment and head of each answer, in small letters, as they come.
    """
    answers: Answers = []
    stopping = threading.Event()

    def next_in(head: bytes) -> float | None:
        answers.append((time.time(), head))
        return None if stopping.is_set() else len(requests) / per_s

    asking = ask(requests, port, next_in, tls=True, lost=True)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asyncio.run, asking)
        try:
            yield answers
        finally:
            stopping.set()
            asked.result(120)  # raises what a client met


async def ask(
    requests: Sequence[bytes], port: int, next_in: NextIn, *, tls: bool = False, lost: bool = False
) -> None:
    """Send each request on a connection of its own, again and again, until `next_in` ends it.

    Raises:
        RuntimeError: an answer was not a 200, and those lost are not taken.
        OSError, EOFError: a connection was closed.
    """
    context = None
    if tls:  # no certificate is checked
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def one(request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        wait_s: float | None = 0.0
        while wait_s is not None:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            if length is None or not (lost or head.startswith(b"HTTP/1.1 200")):
                raise RuntimeError(f"expected 200 and a length: {head[:200]!r}")
            await reader.readexactly(int(length[1]))
            wait_s = next_in(head.lower())
            if wait_s:
                await asyncio.sleep(wait_s)
        writer.close()
        with suppress(OSError):  # its answers say what it met
            await writer.wait_closed()

    await asyncio.gather(*map(one, requests))
