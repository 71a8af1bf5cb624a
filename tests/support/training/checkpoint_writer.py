"""A writer of checkpoints that tests kill; a child process each time, since imports take seconds.

Reads commands, a line each: the first epoch, and where to write: a folder, or the endpoint and
prefix of an S3 service. Says `child PID`, then `wrote EPOCH` when a checkpoint is whole, for ever;
then `ended STATUS`. The state of an epoch holds nothing but its number.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import torch
from pydantic import SecretStr

from tasks.training.checkpoints.access import S3Access
from tasks.training.checkpoints.places import LocalPlace, Place
from tasks.training.checkpoints.state import State
from tasks.training.checkpoints.store import CheckpointStore
from tasks.training.checkpoints.writer import CheckpointWriter

NUM_KEPT = 2
SHARD_BYTES = 200_000
ROWS = 60_000


def store_at(place: list[str]) -> CheckpointStore:
    """The store of a command: one word is a folder, two are an endpoint and a prefix."""
    target: Place
    if len(place) == 1:
        target = LocalPlace(Path(place[0]))
    else:
        from tasks.training.checkpoints.places import S3Place

        endpoint, prefix = place
        keys = S3Access(
            endpoint=endpoint,
            region="us-east-1",
            access_key_id="test",
            secret_access_key=SecretStr("test"),
        )
        target = S3Place(prefix, keys)
    return CheckpointStore(target, SHARD_BYTES)


def state_of(epoch: int) -> State:
    """A state that shows whether all of it is of the same checkpoint."""
    tensors = {f"t{number}": torch.full((ROWS,), float(epoch)) for number in range(4)}
    return {"epoch": epoch, "network": tensors, "history": [epoch] * 10}


def write_for_ever(epoch: int, place: list[str]) -> None:
    store = store_at(place)
    newest = store.newest()
    assert newest is None or newest.epoch <= epoch
    writer = CheckpointWriter(store, 60, asynchronous=True, num_kept=NUM_KEPT)
    told = 0
    for count in range(1_000_000):
        writer.save(epoch + count, 0, state_of(epoch + count))
        written = int(writer.figures.num_written)  # in order, since these end epochs
        for number in range(told, written):
            sys.stdout.write(f"wrote {epoch + number}\n")
            sys.stdout.flush()
        told = written


def main() -> None:
    torch.set_num_threads(1)  # a child must not fork from threads
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        epoch, *place = line.split()
        child = os.fork()
        if child == 0:
            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
            write_for_ever(int(epoch), place)
        sys.stdout.write(f"child {child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"ended {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
