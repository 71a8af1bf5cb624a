"""The processes of one training run: a guarded one for each rank, their lines and their ends.

What is common to all processes of ranks, local or not: what they inherit, print and end with.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from tasks.kernel import errors, guard
from tasks.kernel.errors import FalajError, TrainingError
from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.launch import rendezvous
from tasks.training.launch.fork_server import KEPT_MEMORY, MAX_MESSAGE_BYTES, ONE_THREAD

KEY_VARIABLES = ("FALAJ_ENCRYPTION", "FALAJ_KEYS", "FALAJ_KEYS_CA", "FALAJ_KEYS_TOKEN_FILE")
"""How ranks read and write what is encrypted: names, addresses and files, no secret."""
# Everything else in the driver's environment may be a secret and stays there. FALAJ_LEASE tells
# under which lease a process runs, so that devices are not given on while it still does.
INHERITED_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    "FALAJ_LEASE", *KEY_VARIABLES,
    # Where a machine's role is asked for: addresses and files, no secret.
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE",
)  # fmt: skip
READ_BYTES = 65536
MAX_LINE_BYTES = 1 << 20


def inherited_environment(driver: Mapping[str, str]) -> dict[str, str]:
    """What ranks may see of the driver's environment, and where the project is."""
    allowed = {name: driver[name] for name in INHERITED_VARIABLES if name in driver}
    return {**allowed, "PYTHONPATH": str(PROJECT_ROOT), "PYTHONUNBUFFERED": "1"}


class Lines:
    """Splits what a pipe delivers into lines."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self.is_open = True
        self._partial = b""
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> list[bytes]:
        """Whole lines that have come; the last one without its end when the pipe closes."""
        chunk = self.pipe.read(READ_BYTES)
        if chunk is None:
            return []
        if chunk == b"":
            self.is_open = False
            return [self._partial] if self._partial else []
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            whole, self._partial = [*whole, self._partial], b""
        return whole


def end_guard(guarding: subprocess.Popen[bytes], within_s: float = guard.END_WITHIN_S) -> None:
    """Ask a guard to end what it guards, and wait until all of it is gone."""
    guarding.terminate()
    try:
        guarding.wait(within_s)
    except subprocess.TimeoutExpired:  # what it guards dies with it
        guarding.kill()
        guarding.wait()


def end_in_words(code: int) -> str:
    """Why a rank is gone that reported nothing, as a clause; 128 plus n where signal n ended it."""
    if code == 128 + signal.SIGKILL:
        return "was killed (signal 9; out of memory?)"
    if code > 128:
        return f"was ended by signal {code - 128} ({signal.strsignal(code - 128)})"
    return f"ended with exit code {code} and without a report"


OUR_KINDS: dict[str, type[FalajError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, FalajError)
}


def error_of_rank(who: str, kind: str, message: str, traceback: str) -> FalajError:
    """A rank's own error: of the same kind where it is one of ours, else a `TrainingError`."""
    error = OUR_KINDS.get(kind, TrainingError)(f"{who}: {kind}: {message}")
    error.add_note(f"Traceback of {who}:\n{traceback}")
    return error


FORK_SERVER = "tasks.training.launch.fork_server"


@contextmanager
def local_environments(
    num_ranks: int, store_file: Path, threads: int = 1, stall_s: int = 90
) -> Iterator[list[dict[str, str]]]:
    """The whole environment of each rank of this host, with a rendezvous server while it lasts.

    It tells of both engines; the strategy decides which of them the rank joins.

    Args:
        num_ranks: ranks of the group.
        store_file: where ranks on torch.distributed meet; absent, a new name for each group.
        threads: CPU threads of a rank.
        stall_s: a rank that is missing from a collective for so long ends the group.
    """
    slots = rendezvous.assignments([rendezvous.HOST_NAME] * num_ranks)
    server = rendezvous.Rendezvous(slots)
    with closing(server):
        yield [
            {
                **inherited_environment(os.environ),
                **rendezvous.network_variables(rendezvous.HOST_NAME),
                **rendezvous.slot_variables(slot, server.address, server.port),
                **rendezvous.CYCLE_VARIABLES,
                **rendezvous.stall_variables(stall_s),
                **rendezvous.local_torch_variables(slot.rank, num_ranks, store_file, stall_s),
                "OMP_NUM_THREADS": str(threads),
            }
            for slot in slots
        ]


class RankGroup:
    """All ranks of one run, forked from a process that has imported what they need.

    A context: when it is left, every process of it is gone. To be entered and left in one thread
    that stays in between: a guard stops what it guards when the thread that started it ends.

    Args:
        module: what ranks run: has `main(arguments)`, called with the run directory.
        run_path: their working folder; shown on the command line, so that `ps` tells whose they
            are.
        environments: the whole environment of each rank.
        lock: descriptor of the lock on the run directory, which the guards keep open.
    """

    def __init__(
        self, module: str, run_path: Path, environments: Sequence[Mapping[str, str]], lock: int
    ) -> None:
        self._codes: dict[int, int] = {}
        self._num_ranks = len(environments)
        self._selector = selectors.DefaultSelector()
        self.stopped: set[int] = set()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                guard.guarded(guard.python("-m", FORK_SERVER, str(run_path), module)),
                env={**inherited_environment(os.environ), **ONE_THREAD, **KEPT_MEMORY},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        for rank, environment in enumerate(environments):
            self._order(rank, environment, lock)
        self._control.setblocking(False)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left, and wait until it is gone."""
        self.stop()
        self._control.close()
        end_guard(self._server)
        for key in list(self._selector.get_map().values()):
            cast(Lines, key.data[1]).pipe.close()
        self._selector.close()

    def _order(self, rank: int, environment: Mapping[str, str], lock: int) -> None:
        reading, writing = os.pipe()
        order = json.dumps({"rank": rank, "environment": dict(environment)}).encode()
        try:
            # Lost where the server has died: its ranks then count as killed.
            with suppress(BrokenPipeError):
                socket.send_fds(self._control, [order], [writing, lock])
        finally:
            os.close(writing)
        lines = Lines(os.fdopen(reading, "rb", buffering=0))
        self._selector.register(lines.pipe, selectors.EVENT_READ, (rank, lines))

    def read_lines(self, wait_s: float) -> list[tuple[int, str]]:
        """Lines that ranks have printed since the last call: (rank, line); waits for a while."""
        found: list[tuple[int, str]] = []
        for key, _ in self._selector.select(wait_s):
            rank, lines = cast(tuple[int, Lines], key.data)
            found += [(rank, line.decode(errors="replace")) for line in lines.read()]
            if not lines.is_open:  # the guard and all that it started have closed their end
                self._selector.unregister(lines.pipe)
                lines.pipe.close()
                self._read_reports(guard.END_WITHIN_S, rank)  # so it ended, and was not stopped
        return found

    @property
    def has_output(self) -> bool:
        """True while a rank may still print something."""
        return bool(self._selector.get_map())

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit code of each rank that has ended; 128 plus n where signal n ended it."""
        self._read_reports(0)
        return dict(sorted(self._codes.items()))

    def stop(self) -> None:
        """Ask the guards of all ranks that still run to end them."""
        for rank in set(range(self._num_ranks)) - self.exit_codes.keys():
            self.stopped.add(rank)
            with suppress(OSError):  # the server is gone, and all ranks with it
                self._control.send(json.dumps({"stop": rank}).encode())

    def _read_reports(self, wait_s: float, rank: int | None = None) -> None:
        """Take in which ranks have ended; waits for `rank`."""
        with selectors.DefaultSelector() as selector:
            if self._control.fileno() < 0:
                return
            selector.register(self._control, selectors.EVENT_READ)
            while selector.select(wait_s if rank not in self._codes else 0):
                try:
                    message = self._control.recv(MAX_MESSAGE_BYTES)
                except ConnectionResetError:
                    message = b""
                if not message:
                    self._hang_up()
                    return
                report = json.loads(message)
                self._codes[report["rank"]] = report["code"]

    def _hang_up(self) -> None:
        """The server has ended by itself: its ranks end with it."""
        self._control.close()
        code = self._server.wait(guard.END_WITHIN_S) or 128 + signal.SIGKILL
        for rank in range(self._num_ranks):
            self._codes.setdefault(rank, guard.shell_code(code))
