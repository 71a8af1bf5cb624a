"""The process that ranks are forked from, and the driver's side of it.

`ForkServer` starts it early, while data is still prepared, sends one order for each rank, and ends
it. Usage of the process itself: python -P -m tasks.training.launch.fork_server FOLDER MODULE...,
standard input a socket, guarded. It has imported all that a rank needs, and nothing more.

Importing PyTorch, Horovod and what the first optimizer pulls in takes a rank two to four seconds; a
fork has it all at once. The process does nothing between orders, so every fork starts alike.

A fork takes along the forking thread alone, and with it locks and pools that only other threads
could free or feed: a rank would hang in its first parallel operator. So the process has one thread
(checked before the first fork), runs no operator, and never asks for a GPU.

    driver -> guard -> fork server -> guard of rank 0 -> rank 0
                                   -> guard of rank 1 -> rank 1
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from types import TracebackType
from typing import IO, Self

from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.launch import guard

MODULE = "tasks.training.launch.fork_server"
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


class ForkServer:
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
                guarded_command("-m", MODULE, str(folder), *modules),
                env={**allowed_environment(os.environ), **ONE_THREAD},
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
            Order(ticket, rank, module, arguments, str(folder), dict(environment), GRACE_S)
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
                message = self._control.recv(MAX_MESSAGE_BYTES)
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

    def __init__(self, server: ForkServer, ticket: int, stdout: IO[bytes]) -> None:
        self._server = server
        self._ticket = ticket
        self.stdout = stdout

    def poll(self) -> int | None:
        """The exit code, once it has ended; 128 plus n where signal n ended it."""
        return self._server.exit_code(self._ticket, time.monotonic())

    def terminate(self) -> None:
        """Ask the guard to end the rank."""
        self._server.send_signal(self._ticket, SIGTERM)

    def wait(self, timeout: float) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        code = self._server.exit_code(self._ticket, time.monotonic() + timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank with ticket {self._ticket}", timeout)
        return code

    def kill(self) -> None:
        """End the rank by ending everything that was forked with it."""
        self._server.close()


MAX_MESSAGE_BYTES = 1 << 17
NUM_DESCRIPTORS = 2  # a rank's output, and the lock on its run directory
PR_SET_NAME = 15
STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = range(3)
# Start no thread: neither for sums of arrays nor for giving memory back.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


@dataclass(frozen=True)
class Order:
    """One rank to fork. What it prints goes into `output`; its guard keeps `lock` open."""

    ticket: int
    rank: int
    module: str
    arguments: Sequence[str]
    folder: str
    environment: dict[str, str]
    grace_s: float
    output: int = -1
    lock: int = -1


def main(arguments: Sequence[str]) -> int:
    """Import the modules, then fork until the driver hangs up; in a fork, be what was ordered."""
    control = socket.socket(fileno=os.dup(STANDARD_INPUT))
    with open(os.devnull, "rb") as nothing:  # ranks have no business with the driver's socket
        os.dup2(nothing.fileno(), STANDARD_INPUT)
    import_all(arguments[1:])
    server_pid = os.getpid()
    order = serve(control)
    control.close()
    return 0 if order is None else be_guard(order, server_pid)


def import_all(modules: Sequence[str]) -> None:
    """Import what a rank needs, and what its first optimizer would import.

    Raises:
        RuntimeError: an import started a thread.
    """
    import torch

    for module in modules:
        importlib.import_module(module)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    threads = sorted(_thread_names())
    if len(threads) > 1:
        raise RuntimeError(
            f"ranks can only be forked from one thread, but importing {', '.join(modules)} has "
            f"started others: {', '.join(threads)}. See ONE_THREAD in {__file__}"
        )
    gc.collect()
    gc.freeze()  # so that the ranks' collections do not copy the shared pages


def _thread_names() -> list[str]:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as stream:
            names.append(stream.read().strip())
    return names


def serve(control: socket.socket) -> Order | None:
    """Fork a guard for each order and report its end, until the driver hangs up.

    Returns:
        None here; in a fork, at once, the order that it is to carry out.
    """
    _send(control, {"ready": os.getpid()})
    children: dict[int, tuple[int, int]] = {}  # descriptor of a guard: its ticket and process id
    while True:
        for ready in _ready(control.fileno(), *children):
            if ready in children:
                ticket, pid = children.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _send(control, {"ticket": ticket, "code": code if code >= 0 else 128 - code})
                continue
            message, descriptors, _, _ = socket.recv_fds(
                control, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS
            )
            if not message:
                return None
            request = json.loads(message)
            if "stop" in request:
                _pass_on(request, children)
                continue
            order = Order(**request, output=descriptors[0], lock=descriptors[1])
            pid = os.fork()
            if pid == 0:
                for descriptor in children:
                    os.close(descriptor)
                return order
            for descriptor in descriptors:
                os.close(descriptor)
            children[os.pidfd_open(pid)] = (order.ticket, pid)


def _ready(*descriptors: int) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]


def _send(control: socket.socket, report: dict[str, int]) -> None:
    try:
        control.send(json.dumps(report).encode())
    except BrokenPipeError:  # the driver has hung up, which is read next
        return


def _pass_on(request: dict[str, int], children: dict[int, tuple[int, int]]) -> None:
    """Send a signal to the guard that has a ticket, unless it has already ended."""
    for descriptor, (ticket, _) in children.items():
        if ticket == request["stop"]:
            signal.pidfd_send_signal(descriptor, signal.Signals(request["signal"]))


def be_guard(order: Order, server_pid: int) -> int:
    """In a fork: guard the rank, as `guard.main` does; returns in the rank alone."""
    for stream in (STANDARD_OUTPUT, STANDARD_ERROR):
        os.dup2(order.output, stream)
    os.close(order.output)
    _set_name(f"guard-of-rank-{order.rank}")
    os.chdir(order.folder)
    # At once: an orderly end would run what the rank's libraries do at exit.
    os._exit(guard.run_guarded(lambda: be_rank(order), server_pid, order.grace_s))


def be_rank(order: Order) -> int:
    """In a fork of the guard: be the rank, with an environment and a name of its own."""
    _set_name(f"falaj-rank-{order.rank}")
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.module, *order.arguments]
    sys.modules[order.module].main(list(order.arguments))
    return 0


def _set_name(name: str) -> None:
    """Name this process as `ps` shows it; the kernel keeps 15 characters."""
    guard.LIBC.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
