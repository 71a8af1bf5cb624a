"""Sends one request over and over on several connections, each waiting for its answer.

    python -m infra.bench.serving.load_client PORT PATH CONNECTIONS SECONDS BODY_FILE

One thread on epoll and raw sockets, so that it leaves the processor to the server it asks. Prints
a line of JSON: requests answered, answers that were not 200, seconds, latencies in microseconds.
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time
from pathlib import Path

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MOST_LATENCIES = 200_000


def request_bytes(path: str, body: bytes) -> bytes:
    """The request as it goes over the wire, with the headers that usual clients send."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: falaj-bench\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def drive(port: int, request: bytes, connections: int, seconds: float) -> dict[str, object]:
    """Ask for so long; connections are opened before the time starts."""
    sockets = {}
    poll = select.epoll()
    for _ in range(connections):
        one = socket.create_connection(("127.0.0.1", port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(one, select.EPOLLIN)
        sockets[one.fileno()] = one
    received = dict.fromkeys(sockets, b"")
    sent_at: dict[int, int] = {}
    latencies: list[int] = []
    num_answered = num_refused = 0
    started = time.monotonic()
    for number, one in sockets.items():
        sent_at[number] = time.monotonic_ns()
        one.sendall(request)
    open_requests = connections
    while open_requests:
        for number, _ in poll.poll(5):
            more = sockets[number].recv(65_536)
            if not more:
                raise RuntimeError(f"the server has closed a connection after {num_answered}")
            data = received[number] + more
            if not _is_whole(data):
                received[number] = data
                continue
            received[number] = b""
            now = time.monotonic_ns()
            num_answered += 1
            num_refused += not data.startswith(b"HTTP/1.1 200")
            if len(latencies) < _MOST_LATENCIES:
                latencies.append((now - sent_at[number]) // 1000)
            if now / 1e9 - started < seconds:
                sent_at[number] = now
                sockets[number].sendall(request)
            else:
                open_requests -= 1
    took = time.monotonic() - started
    for one in sockets.values():
        one.close()
    latencies.sort()
    return {
        "answered": num_answered,
        "refused": num_refused,
        "seconds": took,
        "p50_us": latencies[len(latencies) // 2],
        "p99_us": latencies[len(latencies) * 99 // 100],
    }


def _is_whole(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    length = _LENGTH.search(data, 0, end + 2)
    if length is None:
        raise RuntimeError(f"an answer has no length: {data[:200]!r}")
    return len(data) - end - 4 >= int(length[1])


def main(arguments: list[str]) -> int:
    """Ask as the command line says."""
    port, path, connections, seconds, body = arguments
    request = request_bytes(path, Path(body).read_bytes())
    sys.stdout.write(json.dumps(drive(int(port), request, int(connections), float(seconds))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
