"""The processes of one training run: a guarded one for each rank, their lines and their ends."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from tasks.settings import PROJECT_ROOT
from tasks.training.launch import guard
from tasks.training.launch.rendezvous import rank_variables, rendezvous_server

# Everything else in the driver's environment may be a secret and stays there.
ALLOWED_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
GRACE_S = 5.0
READ_BYTES = 65536


@dataclass(frozen=True)
class RankSpec:
    """What every rank is started with."""

    module: str
    run_path: Path
    num_ranks: int
    threads: int
    stall_warning_s: int
    stall_shutdown_s: int
    lock_descriptor: int

    def command(self) -> list[str]:
        """The guarded command of a rank; says nothing that is not in the run directory's name."""
        # -P: the current folder is no place to import from.
        rank = [sys.executable, "-P", "-m", self.module, str(self.run_path)]
        return [sys.executable, "-S", guard.__file__, str(os.getpid()), str(GRACE_S), "--", *rank]

    def environment(self, rank: int, port: int, driver: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a rank: a few allowed variables of the driver, and Horovod's."""
        allowed = {name: driver[name] for name in ALLOWED_VARIABLES if name in driver}
        identity = rank_variables(
            rank, self.num_ranks, port, self.stall_warning_s, self.stall_shutdown_s
        )
        return {
            **allowed,
            **identity,
            "PYTHONPATH": str(PROJECT_ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(self.threads),
        }


class RankGroup:
    """All ranks of one run. A context: when it is left, every process of it is gone.

    To be entered and left in one thread that stays in between: a guard stops its rank when the
    thread that started it ends.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._guards: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytes] = {}
        self._stack = ExitStack()
        self.stopped: set[int] = set()

    def __enter__(self) -> Self:
        with ExitStack() as undo_on_failure:
            port = undo_on_failure.enter_context(rendezvous_server(self._spec.num_ranks))
            undo_on_failure.callback(self._close)
            for rank in range(self._spec.num_ranks):
                self._start(rank, port)
            self._stack = undo_on_failure.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self, rank: int, port: int) -> None:
        process = subprocess.Popen(
            self._spec.command(),
            cwd=self._spec.run_path,
            env=self._spec.environment(rank, port, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # The guard keeps the run directory locked until the last process of its rank is gone.
            pass_fds=(self._spec.lock_descriptor,),
        )
        self._guards.append(process)
        output = cast(IO[bytes], process.stdout)
        os.set_blocking(output.fileno(), False)
        self._selector.register(output, selectors.EVENT_READ, rank)
        self._partial[rank] = b""

    def read_lines(self, wait_s: float) -> list[tuple[int, str]]:
        """Lines that ranks have printed since the last call: (rank, line); waits for a while."""
        lines: list[tuple[int, str]] = []
        for key, _ in self._selector.select(wait_s):
            rank, output = cast(int, key.data), cast(IO[bytes], key.fileobj)
            chunk = output.read(READ_BYTES)
            if chunk == b"":  # the guard and all that it started have closed their end
                self._selector.unregister(output)
                chunk = b"\n" if self._partial[rank] else b""
            *whole, self._partial[rank] = (self._partial[rank] + (chunk or b"")).split(b"\n")
            lines += [(rank, line.decode(errors="replace")) for line in whole]
        return lines

    @property
    def has_output(self) -> bool:
        """True while a rank may still print something."""
        return bool(self._selector.get_map())

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit code of each rank that has ended; 128 plus n where signal n ended it."""
        codes = {rank: process.poll() for rank, process in enumerate(self._guards)}
        return {
            r: code if code >= 0 else 128 - code for r, code in codes.items() if code is not None
        }

    def stop(self) -> None:
        """Ask the guards of all ranks that still run to end them."""
        ended = self.exit_codes
        for rank, process in enumerate(self._guards):
            if rank not in ended:
                self.stopped.add(rank)
                process.terminate()

    def _close(self) -> None:
        """End what is left, and wait until it is gone."""
        self.stop()
        for process in self._guards:
            try:
                process.wait(GRACE_S + guard.KILL_WAIT_S + 1)
            except subprocess.TimeoutExpired:  # its rank then dies with it: see guard.py
                process.kill()
                process.wait()
            cast(IO[bytes], process.stdout).close()
        self._selector.close()
