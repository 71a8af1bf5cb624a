"""The other end of an SSH session: runs one rank on its host, and never leaves it behind.

Usage: python -S agent.py     (by the driver, as the remote command of ssh)

The first line of stdin is JSON: what to run, where, and in which environment; so nothing of it is
on a command line. What follows belongs to the rank and is passed on. The driver sends a ping every
second: when stdin ends or nothing has come for too long (a cut link ends no session), the rank is
ended. The rank runs under the guard, which ends it when this process is killed.

Only the standard library is used, so that it starts in a few milliseconds.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHUNK_BYTES = 65536
POLL_S = 0.5
# A rank that does not read for so long that this much is waiting is stuck; what comes is dropped.
MAX_WAITING_BYTES = 1 << 20
EXIT_NO_DIRECTORY = 78
EXIT_CUT_OFF = 79


def main() -> int:
    """Run the rank that stdin describes; returns its exit code."""
    first, rest = _first_line()
    if not first:
        return 128 + signal.SIGTERM  # the driver is gone before it said anything
    order: dict[str, Any] = json.loads(first)
    directory = order["directory"]
    if not os.path.isdir(directory):
        sys.stderr.write(
            f"ERROR {os.uname().nodename} has no folder {directory}: the run directory must be "
            "shared, under the same path on all hosts\n"
        )
        return EXIT_NO_DIRECTORY
    kept = {name: os.environ[name] for name in order["inherit"] if name in os.environ}
    guard = [sys.executable, "-S", str(Path(__file__).parents[2] / "kernel" / "guard.py")]
    rank = subprocess.Popen(
        [*guard, str(os.getpid()), str(order["grace_s"]), "--", *order["command"]],
        cwd=directory,
        env={**kept, **order["environment"]},
        stdin=subprocess.PIPE,
    )
    return _pass_on(rank, rest, order["silence_limit_s"])


def _first_line() -> tuple[bytes, bytes]:
    """The first line of stdin, and what has come behind it."""
    received = b""
    while b"\n" not in received:
        chunk = os.read(0, CHUNK_BYTES)
        if not chunk:
            return b"", b""
        received += chunk
    first, _, rest = received.partition(b"\n")
    return first, rest


def _pass_on(rank: subprocess.Popen[bytes], waiting: bytes, silence_limit_s: float) -> int:
    """Hand stdin to the rank until the rank ends or the driver is gone."""
    assert rank.stdin is not None
    output = rank.stdin.fileno()
    os.set_blocking(output, False)
    heard_at = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while rank.poll() is None and time.monotonic() - heard_at < silence_limit_s:
            waiting = _written(output, waiting)
            if not selector.select(POLL_S):
                continue
            chunk = os.read(0, CHUNK_BYTES)
            if not chunk:
                break
            heard_at = time.monotonic()
            if len(waiting) < MAX_WAITING_BYTES:
                waiting += chunk
    if rank.poll() is None:
        _end(rank)
        return EXIT_CUT_OFF
    code = rank.returncode
    return code if code >= 0 else 128 - code


def _written(output: int, waiting: bytes) -> bytes:
    """Write what the rank takes now; returns what is left."""
    try:
        return waiting[os.write(output, waiting) :] if waiting else b""
    except BlockingIOError:
        return waiting
    except BrokenPipeError:
        return b""


def _end(rank: subprocess.Popen[bytes]) -> None:
    """Close the rank's stdin, at which it ends by itself; its guard sees to the rest."""
    assert rank.stdin is not None
    rank.stdin.close()
    try:
        rank.wait(POLL_S)
    except subprocess.TimeoutExpired:
        rank.terminate()
        rank.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of stdin says it as well
    sys.exit(main())
