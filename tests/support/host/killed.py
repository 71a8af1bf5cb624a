"""Writers that tests kill: a child process for each command, since imports take seconds.

A program calls `serve`; a test starts it by `killed_writer` and has its children killed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.kernel.guard import die_with_parent
from tests.support.host.processes import python


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def serve(write: Callable[..., None]) -> None:
    """Write for ever for each line of standard input, its words as arguments, in a child.

    A child says `wrote NUMBER` whenever it has written something whole.
    """
    say("ready")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            die_with_parent()
            write(*line.split())
            os._exit(1)
        say(f"child {child}")
        _, status = os.waitpid(child, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


class KilledWriter:
    """Begins writers, and kills them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._hear("ready")

    def _hear(self, *expected: str) -> tuple[str, int]:
        """Word and number of the next line."""
        word, _, number = self._process.stdout.readline().strip().partition(" ")
        assert word in expected
        return word, int(number or 0)

    def write_and_be_killed(self, first: int, *where: str, num_whole: int, further_s: float) -> int:
        """Write number `first` and those after it, and die a while after some are whole.

        Returns:
            The last number that was said to be whole; the one before `first` for none.
        """
        self._process.stdin.write(f"{first} {' '.join(where)}\n")
        self._process.stdin.flush()
        _, child = self._hear("child")
        reported = first - 1
        for _ in range(num_whole):
            _, reported = self._hear("wrote")
        time.sleep(further_s)  # to somewhere in the middle of a write
        os.kill(child, signal.SIGKILL)
        while (said := self._hear("wrote", "ended"))[0] == "wrote":
            reported = said[1]
        assert said[1] == -signal.SIGKILL
        return reported


@contextmanager
def killed_writer(module: str) -> Iterator[KilledWriter]:
    """A program that serves, until the block ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with python("-W", "ignore", "-m", module, **pipes) as process:
        try:
            yield KilledWriter(process)
        finally:
            process.kill()
