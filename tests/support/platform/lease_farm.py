"""Processes that lease devices, work on them and give them back, for tests to kill.

    python -m tests.support.platform.lease_farm ORDERS.json

A worker that holds devices locks a file for each part of them. The kernel lets go of the locks of a
process that dies, so a lock that cannot be had at once is a device that two hold: the oracle.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.leases import acquire
from tasks.control.leases.repository import LeaseRepository
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until
from tests.support.platform.lease_devices import host


@dataclass(frozen=True)
class Orders:
    """What a farm is to do; plain values, to travel as JSON."""

    folder: str
    num_workers: int
    devices: dict[str, Any]
    requests: list[dict[str, Any]]
    hold_s: float
    rounds: int = 1_000_000
    """Leases that each worker takes before it ends."""

    @classmethod
    def read(cls, path: str) -> Self:
        return cls(**json.loads(Path(path).read_text()))


def main(arguments: list[str]) -> None:
    """Keep as many workers alive as ordered, until the file `stop` appears or all have ended."""
    orders = Orders.read(arguments[0])
    folder = Path(orders.folder)
    running: dict[int, int] = {}
    seats = list(range(orders.num_workers))
    while True:
        while seats and not (folder / "stop").exists():
            seat = seats.pop()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _work(orders, seat)
                os._exit(0)
            running[pid] = seat
        if not running:
            return
        pid, status = os.wait()
        seat = running.pop(pid)
        if os.WIFSIGNALED(status):  # was killed: another takes its seat
            seats.append(seat)


def _work(orders: Orders, seat: int) -> None:
    folder, chance = Path(orders.folder), random.Random(os.getpid())
    devices = HostDevices.model_validate(orders.devices)
    repository = LeaseRepository(folder / "leases")
    for _ in range(orders.rounds):
        if (folder / "stop").exists():
            return
        request = LeaseRequest.model_validate(chance.choice(orders.requests))
        priority = chance.randint(1, 5)
        with (
            acquire(
                repository, request, f"seat {seat}", priority=priority, devices=devices
            ) as lease,
            ExitStack() as locks,
        ):
            for unit in (*lease.grant.cores, *lease.grant.gpus):
                _lock(folder / f"{unit}.lock", locks)
            _note(folder / "journal", f"{lease.lease_id} {os.getpid()}")
            time.sleep(chance.uniform(0, orders.hold_s))


def _lock(file: Path, locks: ExitStack) -> None:
    stream = locks.enter_context(file.open("a"))
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _note(file.parent / "violations", f"{os.getpid()} and another hold {file.name}")


def _note(file: Path, line: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def _start(folder: Path, **changes: Any) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    orders = Orders(
        **{
            "folder": str(folder),
            "num_workers": 6,
            "devices": host(cores=3, gpus=2).model_dump(mode="json"),
            "requests": [
                {"cores": 1},
                {"cores": 2},
                {"gpus": 1},
                {"cores": 1, "gpus": 1},
                {"gpus": 2},
            ],
            "hold_s": 0.1,
            **changes,
        }
    )
    file = folder / "orders.json"
    file.write_text(json.dumps(asdict(orders)))
    line = [sys.executable, "-m", "tests.support.platform.lease_farm", str(file)]
    return subprocess.Popen(line, cwd=PROJECT_ROOT)


@contextmanager
def farm(folder: Path, **changes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A farm whose files lie in `folder`; all its processes are gone when the block is left."""
    process = _start(folder, **changes)
    try:
        yield process
    finally:
        (folder / "stop").touch()
        for pid in children_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def children_of(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in listing.read_text().split()] if listing.exists() else []


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def kill_at_random(folder: Path, num_kills: int) -> None:
    """Kill workers at random moments; at the end nothing is held, and nothing ever was by two."""
    chance = random.Random(5)
    with farm(folder) as process:
        wait_until(lambda: lines_of(folder / "journal"), "a first lease", 240)
        for _ in range(num_kills):
            served = len(lines_of(folder / "journal"))
            time.sleep(chance.uniform(0, 0.05))
            if workers := children_of(process.pid):
                os.kill(chance.choice(workers), signal.SIGKILL)
            wait_until(
                lambda: len(lines_of(folder / "journal")) > served,  # noqa: B023
                "a lease after a kill",
                120,
            )
        (folder / "stop").touch()
        process.wait(120)
    assert not lines_of(folder / "violations")
    assert LeaseRepository(folder / "leases").claims() == []


if __name__ == "__main__":
    main(sys.argv[1:])
