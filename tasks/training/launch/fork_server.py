"""The process that the ranks of a run are forked from: python -P -m ... FOLDER MODULE, guarded.

Standard input is a socket to `rank_group.RankGroup`, which sends one order for each rank. MODULE
has `main(arguments)`, called with FOLDER. The process has imported all that a rank needs, and what
its first optimizer pulls in, which takes a rank two to four seconds; a fork has it all at once.

A fork takes along the forking thread alone, and with it locks and pools that only other threads
could free or feed: a rank would hang in its first parallel operator. So the process has one thread
(checked before the first fork), runs no operator, and never asks for a GPU.

    driver -> guard -> fork server -> guard of rank 0 -> rank 0
                                   -> guard of rank 1 -> rank 1
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tasks.kernel import guard

# Start no thread: neither for sums of arrays nor for giving memory back.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# glibc maps arrays of some MiB anew at each step, and the kernel clears their pages. A process that
# keeps its memory saves about a sixth of a step on one core.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
MAX_MESSAGE_BYTES = 1 << 17
NUM_DESCRIPTORS = 2  # a rank's output, and the lock on its run directory
PR_SET_NAME = 15
STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = range(3)


@dataclass(frozen=True)
class Order:
    """One rank to fork."""

    rank: int
    environment: dict[str, str]
    output: int
    """Descriptor that takes what the rank prints."""


def main(arguments: Sequence[str]) -> int:
    """Import the module, then fork until the driver hangs up; in a fork, be what was ordered."""
    folder, module = arguments
    control = socket.socket(fileno=os.dup(STANDARD_INPUT))
    with open(os.devnull, "rb") as nothing:  # ranks have no business with the driver's socket
        os.dup2(nothing.fileno(), STANDARD_INPUT)
    import_all(module)
    server_pid = os.getpid()
    order = serve(control)
    control.close()
    return 0 if order is None else be_guard(order, folder, module, server_pid)


def import_all(module: str) -> None:
    """Import what a rank needs, and what its first optimizer would import.

    Raises:
        RuntimeError: an import started a thread.
    """
    import torch

    importlib.import_module(module)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(
            f"ranks can only be forked from one thread, but importing {module} has started "
            f"{len(threads) - 1} more. See ONE_THREAD in {__file__}"
        )
    gc.collect()
    gc.freeze()  # so that the ranks' collections do not copy the shared pages


def serve(control: socket.socket) -> Order | None:
    """Fork a guard for each order and report its end, until the driver hangs up.

    Returns:
        None here; in a fork, at once, the order that it is to carry out.
    """
    children: dict[int, tuple[int, int]] = {}  # descriptor of a guard: its rank and process id
    while True:
        for ready in select.select([control.fileno(), *children], [], [])[0]:
            if ready in children:
                rank, pid = children.pop(ready)
                os.close(ready)
                code = guard.shell_code(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                with suppress(BrokenPipeError):  # the driver has hung up, which is read next
                    control.send(json.dumps({"rank": rank, "code": code}).encode())
                continue
            message, descriptors, _, _ = socket.recv_fds(
                control, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS
            )
            if not message:
                return None
            request = json.loads(message)
            if "stop" in request:
                for guard_descriptor in [d for d, c in children.items() if c[0] == request["stop"]]:
                    signal.pidfd_send_signal(guard_descriptor, signal.SIGTERM)
                continue
            order = Order(**request, output=descriptors[0])
            pid = os.fork()
            if pid == 0:
                for descriptor in children:
                    os.close(descriptor)
                return order
            for descriptor in descriptors:
                os.close(descriptor)
            children[os.pidfd_open(pid)] = (order.rank, pid)


def be_guard(order: Order, folder: str, module: str, server_pid: int) -> int:
    """In a fork: guard the rank, as `guard.main` does; returns in the rank alone."""

    def be_rank() -> int:
        _set_name(f"falaj-rank-{order.rank}")
        os.environ.clear()
        os.environ.update(order.environment)
        sys.argv = [module, folder]
        sys.modules[module].main([folder])
        return 0

    for stream in (STANDARD_OUTPUT, STANDARD_ERROR):
        os.dup2(order.output, stream)
    os.close(order.output)
    _set_name(f"guard-of-rank-{order.rank}")
    os.chdir(folder)
    # At once: an orderly end would run what the rank's libraries do at exit.
    os._exit(guard.run_guarded(be_rank, server_pid, guard.GRACE_S))


def _set_name(name: str) -> None:
    """Name this process as `ps` shows it; the kernel keeps 15 characters."""
    guard.LIBC.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
