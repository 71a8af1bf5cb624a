"""Kill a writer of checkpoints at random moments, and look at what it leaves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from tasks.kernel.settings import PROJECT_ROOT
from tests.support.training.checkpoint_writer import state_of, store_at
from tests.support.training.states import assert_equal


class KilledWriter:
    """Starts children that write checkpoints into one place, and kills them."""

    def __init__(self, place: list[str]) -> None:
        self._place = place
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.training.checkpoint_writer"],
            cwd=PROJECT_ROOT,
            env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        self._read_number("ready")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _read_number(self, expected: str) -> int:
        assert self._process.stdout
        word, _, number = self._process.stdout.readline().strip().partition(" ")
        assert word == expected
        return int(number or 0)

    def write_and_be_killed(self, first: int, num_whole: int, further_s: float) -> int:
        """Write from epoch `first` on, and die a while after some are whole.

        Returns:
            The last epoch that was said to be whole.
        """
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{first} {' '.join(self._place)}\n")
        self._process.stdin.flush()
        child = self._read_number("child")
        reported = first - 1
        for _ in range(num_whole):
            reported = self._read_number("wrote")
        time.sleep(further_s)  # to somewhere in the middle of a write
        os.kill(child, signal.SIGKILL)
        for line in self._process.stdout:
            word, number = line.split()
            if word == "ended":
                assert int(number) == -signal.SIGKILL
                return reported
            reported = int(number)
        raise AssertionError("the writer is gone")


def kill_and_look(place: list[str], num_kills: int, seed: int) -> None:
    """Kill a writer so many times; what it leaves is always whole, and never older than it said."""
    draw, epoch = random.Random(seed), 0
    with KilledWriter(place) as writer:
        for kill in range(num_kills):
            first = epoch + 1
            reported = writer.write_and_be_killed(first, draw.randrange(3), draw.uniform(0, 0.15))
            store = store_at(place)
            newest = store.newest()
            if newest is None:
                assert reported == 0, f"kill {kill}: epoch {reported} was whole, now there is none"
                continue
            assert newest.epoch >= max(reported, epoch), f"kill {kill}: {newest} is old"
            assert_equal(store.load(newest), state_of(newest.epoch))
            epoch = newest.epoch
    assert epoch > 0
