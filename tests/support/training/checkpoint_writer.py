"""A writer of checkpoints that tests kill; a child process each time, since imports take seconds.

Reads commands, a line each: the first epoch, and where to write: a folder, or the endpoint and
prefix of an S3 service. Prints `child PID`, then `wrote EPOCH` when a checkpoint is complete, until
it is killed; then `ended STATUS`. The state of an epoch holds nothing but its number.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from pydantic import SecretStr

from tasks.training.checkpoints.location import Location, S3Access, S3Location
from tasks.training.checkpoints.store import CheckpointStore
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.strategies.base import State

PR_SET_PDEATHSIG = 1
ROWS = 60_000
KEY = "test"


def access(endpoint: str) -> S3Access:
    """Of the tests' S3 service."""
    return S3Access(
        endpoint_override=endpoint,
        region="us-east-1",
        access_key=KEY,
        secret_key=SecretStr(KEY),
    )


def store_at(where: list[str]) -> CheckpointStore:
    """The store of a command: one word is a folder, two are an endpoint and a prefix."""
    if len(where) == 1:
        return CheckpointStore(Location(Path(where[0])))
    endpoint, prefix = where
    return CheckpointStore(S3Location(prefix, access(endpoint)))


def state_of(epoch: int) -> State:
    """A state that shows whether all of it is of the same checkpoint."""
    tensors = {f"t{number}": torch.full((ROWS,), float(epoch)) for number in range(4)}
    return {"epoch": epoch, "network": tensors, "history": [epoch] * 10}


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def write_until_killed(first: int, where: list[str]) -> None:
    store = store_at(where)
    newest = store.newest()
    assert newest is None or newest.epoch <= first
    writer = CheckpointWriter(store, 60, asynchronous=True)
    for epoch in itertools.count(first):
        writer.save(epoch, 0, state_of(epoch), lambda epoch=epoch: say(f"wrote {epoch}"))  # type: ignore[misc]


def main() -> None:
    torch.set_num_threads(1)  # a child must not fork from threads
    say("ready")
    for line in sys.stdin:
        epoch, *where = line.split()
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            write_until_killed(int(epoch), where)
        say(f"child {child}")
        _, status = os.waitpid(child, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
