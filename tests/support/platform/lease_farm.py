"""Processes that lease devices, work on them and give them back, for tests to kill.

    python -m tests.support.platform.lease_farm FOLDER

A worker that holds devices locks a file for each of them. The kernel lets go of the locks of a
process that dies, so a lock that cannot be had at once is a device that two hold: the oracle.
"""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.control.config import LeaseRequest
from tasks.control.leases.repository import LeaseRepository, acquire
from tests.support.host.processes import python, wait_until
from tests.support.platform.lease_devices import host

NUM_WORKERS, HOLD_S = 6, 0.1
DEVICES = host(cores=3, gpus=2)
REQUESTS = [
    LeaseRequest(cores=1),
    LeaseRequest(cores=2),
    LeaseRequest(gpus=1),
    LeaseRequest(cores=1, gpus=1),
    LeaseRequest(gpus=2),
]


def main(folder: Path) -> None:
    """Keep the workers alive, until the file `stop` appears."""
    running: set[int] = set()
    while True:
        while len(running) < NUM_WORKERS and not (folder / "stop").exists():
            pid = os.fork()
            if pid == 0:
                _work(folder)
                os._exit(0)
            running.add(pid)
        if not running:
            return
        running.remove(os.wait()[0])  # one that was killed: another takes its place


def _work(folder: Path) -> None:
    chance, leases = random.Random(os.getpid()), LeaseRepository(folder / "leases")
    while not (folder / "stop").exists():
        request, priority = chance.choice(REQUESTS), chance.randint(1, 5)
        with (
            acquire(leases, request, "a worker", priority=priority, devices=DEVICES) as lease,
            ExitStack() as locks,
        ):
            for unit in (*lease.grant.cores, *lease.grant.gpus):
                stream = locks.enter_context((folder / f"{unit}.lock").open("a"))
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    _note(folder / "violations", f"{os.getpid()} and another hold {unit}")
            _note(folder / "journal", lease.lease_id)
            time.sleep(chance.uniform(0, HOLD_S))


def _note(file: Path, line: str) -> None:
    with file.open("a") as stream:
        stream.write(f"{line}\n")


@contextmanager
def farm(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A farm whose files are in `folder`; all its processes are gone when the block is left."""
    folder.mkdir(exist_ok=True)
    process = python("-m", "tests.support.platform.lease_farm", str(folder))
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
    chance, journal = random.Random(5), folder / "journal"
    with farm(folder) as process:
        wait_until(lambda: lines_of(journal), "a first lease", 240)
        for _ in range(num_kills):
            served = len(lines_of(journal))
            time.sleep(chance.uniform(0, 0.05))
            if workers := children_of(process.pid):
                os.kill(chance.choice(workers), signal.SIGKILL)
            wait_until(lambda: len(lines_of(journal)) > served, "a lease after a kill", 120)  # noqa: B023
        (folder / "stop").touch()
        process.wait(120)
    assert not lines_of(folder / "violations")
    assert LeaseRepository(folder / "leases").claims() == []
    assert len(lines_of(journal)) == len(set(lines_of(journal)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
