"""The processes of one training run: a guarded one for each rank, their lines and their ends."""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self, cast

from tasks.training.launch.fork_server import (
    END_WITHIN_S,
    ForkServer,
    allowed_environment,
    guarded_command,
)
from tasks.training.launch.rendezvous import rank_variables, rendezvous_server
from tasks.training.strategies.torch_communicator import local_torch_variables

LOGGER = logging.getLogger(__name__)
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
    store_file: Path
    """Where ranks on torch.distributed meet; absent, and a new name for each attempt."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What else ranks find in their environment; no secrets."""

    def command(self) -> list[str]:
        """The guarded command of a rank; says nothing that is not in the run directory's name."""
        return guarded_command("-m", self.module, str(self.run_path))

    def environment(self, rank: int, port: int, driver: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a rank: a few allowed variables of the driver, and who it is.

        It tells both engines; the strategy decides which of them the rank joins.
        """
        return {
            **allowed_environment(driver),
            **rank_variables(
                rank, self.num_ranks, port, self.stall_warning_s, self.stall_shutdown_s
            ),
            **local_torch_variables(rank, self.num_ranks, self.store_file, self.stall_shutdown_s),
            "OMP_NUM_THREADS": str(self.threads),
            **self.variables,
        }


class RankProcess(Protocol):
    """What is seen of a guarded rank, whether started (`subprocess.Popen`) or forked."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """What the rank prints."""

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""

    def terminate(self) -> None:
        """Ask its guard to end it."""

    def wait(self, timeout: float) -> int:
        """Wait for its end; raise `subprocess.TimeoutExpired` where that takes longer."""

    def kill(self) -> None:
        """End it at once."""


class RankGroup:
    """All ranks of one run. A context: when it is left, every process of it is gone.

    To be entered and left in one thread that stays in between: a guard stops its rank when the
    thread that started it ends.

    Args:
        spec: what to start.
        fork_server: where to fork the ranks; without one, or should it have died, they are started.
    """

    def __init__(self, spec: RankSpec, fork_server: ForkServer | None = None) -> None:
        self._spec = spec
        self._fork_server = fork_server
        self._guards: list[RankProcess] = []
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

    @property
    def how_started(self) -> str:
        """`forked` where the ranks come from a prepared process, else `started`."""
        return "forked" if self._fork_server else "started"

    def _start(self, rank: int, port: int) -> None:
        environment = self._spec.environment(rank, port, os.environ)
        process = self._fork(rank, environment) or self._start_anew(environment)
        self._guards.append(process)
        output = cast(IO[bytes], process.stdout)
        os.set_blocking(output.fileno(), False)
        self._selector.register(output, selectors.EVENT_READ, rank)
        self._partial[rank] = b""

    def _fork(self, rank: int, environment: Mapping[str, str]) -> RankProcess | None:
        spec = self._spec
        if self._fork_server is None:
            return None
        if not self._fork_server.is_alive or spec.module not in self._fork_server.modules:
            LOGGER.warning(
                "there is no living process prepared for %s; ranks are started anew, which takes "
                "some seconds more",
                spec.module,
            )
            self._fork_server = None
            return None
        return self._fork_server.fork(
            rank,
            spec.module,
            [str(spec.run_path)],
            environment,
            spec.run_path,
            spec.lock_descriptor,
        )

    def _start_anew(self, environment: Mapping[str, str]) -> RankProcess:
        return subprocess.Popen(
            self._spec.command(),
            cwd=self._spec.run_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # The guard keeps the run directory locked until the last process of its rank is gone.
            pass_fds=(self._spec.lock_descriptor,),
        )

    def read_lines(self, wait_s: float) -> list[tuple[int, str]]:
        """Lines that ranks have printed since the last call: (rank, line); waits for a while."""
        lines: list[tuple[int, str]] = []
        for key, _ in self._selector.select(wait_s):
            rank, output = cast(int, key.data), cast(IO[bytes], key.fileobj)
            chunk = output.read(READ_BYTES)
            if chunk == b"":  # the guard and all that it started have closed their end
                self._selector.unregister(output)
                with suppress(subprocess.TimeoutExpired):
                    self._guards[rank].wait(END_WITHIN_S)  # so it ended, and was not stopped
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
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:  # its rank then dies with it: see guard.py
                process.kill()
                process.wait(END_WITHIN_S)
            cast(IO[bytes], process.stdout).close()
        self._selector.close()
