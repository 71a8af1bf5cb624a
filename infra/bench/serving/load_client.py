"""Sends one request over and over on several connections, each waiting for its answer.

    python -m infra.bench.serving.load_client PORT PATH CONNECTIONS SECONDS BODY_FILE

One thread on epoll and raw sockets, so that it leaves the processor to the server it asks. Prints
how many requests were answered.
"""

from __future__ import annotations

import re
import select
import socket
import sys
import time
from pathlib import Path

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def drive(port: int, path: str, connections: int, seconds: float, body: bytes) -> int:
    """Ask for so long with the headers of usual clients; how many were answered.

    Raises:
        RuntimeError: an answer was not a 200, or a connection was closed.
    """
    request = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: falaj-bench\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    sockets = {}
    poll = select.epoll()
    for _ in range(connections):
        one = socket.create_connection(("127.0.0.1", port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(one, select.EPOLLIN)
        sockets[one.fileno()] = one
    received = dict.fromkeys(sockets, b"")
    num_answered, num_open, until = 0, connections, time.monotonic() + seconds
    for one in sockets.values():
        one.sendall(request)
    while num_open:
        for number, _ in poll.poll(5):
            more = sockets[number].recv(65_536)
            received[number] += more
            if not more:
                raise RuntimeError(f"the server has closed a connection after {num_answered}")
            if not _is_whole(received[number]):
                continue
            received[number] = b""
            num_answered += 1
            if time.monotonic() < until:
                sockets[number].sendall(request)
            else:
                num_open -= 1
    for one in sockets.values():
        one.close()
    return num_answered


def _is_whole(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    length = _LENGTH.search(data, 0, end + 2)
    if length is None or not data.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"expected 200 and a length: {data[:200]!r}")
    return len(data) - end - 4 >= int(length[1])


if __name__ == "__main__":
    port, path, connections, seconds, file = sys.argv[1:]
    num = drive(int(port), path, int(connections), float(seconds), Path(file).read_bytes())
    sys.stdout.write(f"{num}\n")
