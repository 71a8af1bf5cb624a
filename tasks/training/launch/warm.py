"""The process that ranks are forked from: it has imported all that a rank needs, and nothing more.

Usage: python -P -m tasks.training.launch.warm FOLDER MODULE..., standard input a socket, guarded.

Importing PyTorch, Horovod and what the first optimizer pulls in takes a rank two to four seconds; a
fork has it all at once. The driver starts this process early, while data is still prepared, and
sends one order for each rank. It never does anything between orders, so every fork starts alike.

A fork takes along the forking thread alone, and with it locks and pools that only other threads
could free or feed: a rank would hang in its first parallel operator. So this process has one thread
(checked before the first fork), runs no operator, and never asks for a GPU.

    driver -> guard -> this process -> guard of rank 0 -> rank 0
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
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.training.launch import guard

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
    warm_pid = os.getpid()
    order = serve(control)
    control.close()
    return 0 if order is None else be_guard(order, warm_pid)


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


def be_guard(order: Order, warm_pid: int) -> int:
    """In a fork: guard the rank, as `guard.main` does; returns in the rank alone."""
    for stream in (STANDARD_OUTPUT, STANDARD_ERROR):
        os.dup2(order.output, stream)
    os.close(order.output)
    _set_name(f"guard-of-rank-{order.rank}")
    os.chdir(order.folder)
    # At once: an orderly end would run what the rank's libraries do at exit.
    os._exit(guard.run_guarded(lambda: be_rank(order), warm_pid, order.grace_s))


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
