"""The driver's side of `warm.py`: start it early, order ranks from it, and end it.

A context, to be entered and left in one thread that stays in between: a guard stops what it guards
when the thread that started it ends.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from signal import SIGKILL, SIGTERM
from types import TracebackType
from typing import IO, Self

from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.launch import guard, warm

# Everything else in the driver's environment may be a secret and stays there. FALAJ_LEASE tells
# under which lease a process runs, so that devices are not given on while it still does.
ALLOWED_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    "FALAJ_LEASE",
)  # fmt: skip
GRACE_S = 5.0
# A guard gives its ranks the grace, then kills; what is not gone by then, it will not end.
END_WITHIN_S = GRACE_S + guard.KILL_WAIT_S + 1
WAS_KILLED = 128 + SIGKILL


def allowed_environment(driver: Mapping[str, str]) -> dict[str, str]:
    """What ranks may see of the driver's environment, and where the project lies."""
    allowed = {name: driver[name] for name in ALLOWED_VARIABLES if name in driver}
    return {**allowed, "PYTHONPATH": str(PROJECT_ROOT), "PYTHONUNBUFFERED": "1"}


def guarded_command(*command: str) -> list[str]:
    """A Python command (`-m module ...`) under a guard that is a child of this process."""
    # -P: the current folder is no place to import from.
    python = [sys.executable, "-P", *command]
    return [sys.executable, "-S", guard.__file__, str(os.getpid()), str(GRACE_S), "--", *python]


class Nursery:
    """A process that has imported everything, from which ranks are forked.

    Args:
        modules: what ranks may run: modules with `main(arguments)`, imported once, here.
        folder: shown on the command line, so that `ps` tells whose process this is.
    """

    def __init__(self, modules: Sequence[str], folder: Path) -> None:
        self.modules = tuple(modules)
        self._num_orders = 0
        self._codes: dict[int, int] = {}
        self._has_hung_up = False
        self.is_ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._guard = subprocess.Popen(
                guarded_command("-m", warm.__name__, str(folder), *modules),
                env={**allowed_environment(os.environ), **warm.ONE_THREAD},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """True while ranks can be forked, or will be once everything is imported."""
        return self._guard.poll() is None

    def wait_until_ready(self, limit_s: float) -> bool:
        """Wait until everything is imported; False where that is not so within the limit."""
        deadline = time.monotonic() + limit_s
        self._read_reports(lambda: self.is_ready, deadline)
        return self.is_ready

    def fork(
        self,
        rank: int,
        module: str,
        arguments: list[str],
        environment: Mapping[str, str],
        folder: Path,
        lock: int,
    ) -> ForkedRank:
        """Fork a guarded rank, at once or as soon as everything is imported.

        Args:
            rank: for its name.
            module: one of `modules`.
            arguments: of the module's `main`.
            environment: the whole environment of the rank.
            folder: its working folder.
            lock: descriptor that its guard keeps open.
        """
        ticket = self._num_orders
        self._num_orders += 1
        order = asdict(
            warm.Order(ticket, rank, module, arguments, str(folder), dict(environment), GRACE_S)
        )
        del order["output"], order["lock"]  # numbers in this process; the socket carries them
        reading, writing = os.pipe()
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], [writing, lock])
        except BrokenPipeError:
            self._codes[ticket] = WAS_KILLED
        finally:
            os.close(writing)
        return ForkedRank(self, ticket, os.fdopen(reading, "rb", buffering=0))

    def exit_code(self, ticket: int, deadline: float) -> int | None:
        """Exit code of the rank with that ticket; None where it still runs at the deadline."""
        self._read_reports(lambda: ticket in self._codes, deadline)
        if ticket not in self._codes and self._has_hung_up:
            # What had not ended before was ended with the process that it came from.
            self._codes[ticket] = self._guard.wait(END_WITHIN_S) or WAS_KILLED
        return self._codes.get(ticket)

    def send_signal(self, ticket: int, number: int) -> None:
        """Send a signal to the guard of the rank with that ticket, if it has not ended."""
        try:
            self._control.send(json.dumps({"stop": ticket, "signal": number}).encode())
        except OSError:  # it is gone, and all its ranks with it
            return

    def close(self) -> None:
        """End the process and every rank that is left, and wait until they are gone."""
        self._has_hung_up = True
        self._control.close()
        self._guard.terminate()
        try:
            self._guard.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:  # all die with it: see guard.py
            self._guard.kill()
            self._guard.wait()

    def _read_reports(self, is_enough: Callable[[], bool], deadline: float) -> None:
        """Take in what was reported, until it is enough or the deadline has passed."""
        while not self._has_hung_up and not is_enough():
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._control], [], [], left_s)[0]:
                return
            try:
                message = self._control.recv(warm.MAX_MESSAGE_BYTES)
            except ConnectionResetError:
                message = b""
            if message:
                self._take(json.loads(message))
            else:
                self._has_hung_up = True

    def _take(self, report: dict[str, int]) -> None:
        if "ready" in report:
            self.is_ready = True
        else:
            self._codes[report["ticket"]] = report["code"]


class ForkedRank:
    """A guarded rank that was forked; looks like the `subprocess.Popen` of a started one."""

    def __init__(self, nursery: Nursery, ticket: int, stdout: IO[bytes]) -> None:
        self._nursery = nursery
        self._ticket = ticket
        self.stdout = stdout

    def poll(self) -> int | None:
        """The exit code, once it has ended; 128 plus n where signal n ended it."""
        return self._nursery.exit_code(self._ticket, time.monotonic())

    def terminate(self) -> None:
        """Ask the guard to end the rank."""
        self._nursery.send_signal(self._ticket, SIGTERM)

    def wait(self, timeout: float) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        code = self._nursery.exit_code(self._ticket, time.monotonic() + timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank with ticket {self._ticket}", timeout)
        return code

    def kill(self) -> None:
        """End the rank by ending everything that was forked with it."""
        self._nursery.close()
