"""A writer of checkpoints that is killed at random moments, and what it leaves.

Its commands are the first epoch, and where to write: a folder, or the endpoint and prefix of an S3
service. The state of an epoch holds nothing but its number.
"""

import itertools
import random
from pathlib import Path

import torch

from tasks.kernel.location import AccessName, Location
from tasks.training.checkpoints.disk import Disk
from tasks.training.checkpoints.store import CheckpointStore
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.strategies.base import State
from tests.support.host.killed import killed_writer, say, serve
from tests.support.training.states import assert_equal

ROWS = 60_000
KEY = "test"


def access(endpoint: str) -> dict[AccessName, str]:
    """Of the tests' S3 service."""
    return {"endpoint": endpoint, "access_key_id": KEY, "secret_access_key": KEY}


def store_at(where: list[str]) -> CheckpointStore:
    """The store of a command: one word is a folder, two are an endpoint and a prefix."""
    if len(where) == 1:
        return CheckpointStore(Disk(Path(where[0])))
    endpoint, prefix = where
    return CheckpointStore(Location(f"s3://{prefix}", access(endpoint)))


def state_of(epoch: int) -> State:
    """A state that shows whether all of it is of the same checkpoint."""
    tensors = {f"t{number}": torch.full((ROWS,), float(epoch)) for number in range(4)}
    return {"epoch": epoch, "network": tensors, "history": [epoch] * 10}


def write_until_killed(first: str, *where: str) -> None:
    store = store_at(list(where))
    newest = store.newest()
    assert newest is None or newest.epoch <= int(first)
    writer = CheckpointWriter(store, 60, asynchronous=True)
    for epoch in itertools.count(int(first)):
        writer.save(epoch, 0, state_of(epoch), lambda epoch=epoch: say(f"wrote {epoch}"))  # type: ignore[misc]


def kill_and_look(place: list[str], num_kills: int, seed: int) -> None:
    """Kill a writer so many times; what it leaves is always whole, and never older than it said."""
    draw, epoch = random.Random(seed), 0
    with killed_writer("tests.support.training.checkpoint_writer") as writer:
        for kill in range(num_kills):
            first = epoch + 1
            reported = writer.write_and_be_killed(
                first, *place, num_whole=draw.randrange(3), further_s=draw.uniform(0, 0.15)
            )
            store = store_at(place)
            newest = store.newest()
            if newest is None:
                assert reported == 0, f"kill {kill}: epoch {reported} was whole, now there is none"
                continue
            assert newest.epoch >= max(reported, epoch), f"kill {kill}: {newest} is old"
            assert_equal(store.load(newest), state_of(newest.epoch))
            epoch = newest.epoch
    assert epoch > 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # a child must not fork from threads
    serve(write_until_killed)
