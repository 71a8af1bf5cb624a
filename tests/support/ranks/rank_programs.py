"""Start a program on several local ranks that may talk by Horovod and by torch.distributed.

As a program, with a folder, it is a driver of ranks that would stay for ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.launch import guard
from tasks.training.launch.fork_server import ForkServer
from tasks.training.launch.rank_group import RankGroup, RankSpec
from tasks.training.launch.rendezvous import rank_variables, rendezvous_server
from tasks.training.strategies.torch_communicator import local_torch_variables

GRACE_S = 2
STALL_WARNING_S = 20
STALL_SHUTDOWN_S = 60
LIMIT_S = 280.0
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
RANK_MODULE = "tests.support.ranks.described_rank"
GONE_WITHIN_S = 20


def run_on_ranks(
    module: str, folder: Path, num_ranks: int, *arguments: str, limit_s: float = LIMIT_S
) -> None:
    """Run `python -m MODULE FOLDER ARGUMENTS` on `num_ranks` guarded ranks until all have ended.

    Raises:
        AssertionError: a rank ended with an error, or not in time; says what all ranks printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store_file = folder / f"store-{uuid.uuid4().hex}"
    with rendezvous_server(num_ranks) as port:
        ranks = [
            _start(module, folder, arguments, rank, num_ranks, port, store_file)
            for rank in range(num_ranks)
        ]
        try:
            codes = _wait(ranks, time.monotonic() + limit_s)
        finally:
            for process in ranks:
                process.terminate()
                process.wait()
    logs = [_log(folder, rank, num_ranks) for rank in range(num_ranks)]
    said = "\n".join(f"--- rank {rank}\n{log.read_text()}" for rank, log in enumerate(logs))
    assert codes == [0] * num_ranks, f"exit codes {codes}:\n{said}"


def _start(
    module: str,
    folder: Path,
    arguments: tuple[str, ...],
    rank: int,
    num_ranks: int,
    port: int,
    store_file: Path,
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-m", module, str(folder), *arguments]
    guarded = [sys.executable, "-S", guard.__file__, str(os.getpid()), str(GRACE_S), "--", *command]
    environment = {
        **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        "PYTHONPATH": str(PROJECT_ROOT),
        "OMP_NUM_THREADS": "1",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        **rank_variables(rank, num_ranks, port, STALL_WARNING_S, STALL_SHUTDOWN_S),
        **local_torch_variables(rank, num_ranks, store_file),
    }
    with _log(folder, rank, num_ranks).open("wb") as log:
        return subprocess.Popen(
            guarded, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _log(folder: Path, rank: int, num_ranks: int) -> Path:
    return folder / f"rank-{rank}-of-{num_ranks}.log"


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Until all have ended, one has failed, or the deadline."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if None not in codes or any(codes):
            return codes
        time.sleep(0.05)
    return [process.poll() for process in ranks]


@contextmanager
def group(
    folder: Path, fork_server: ForkServer | None, *ways: str, threads: int = 1
) -> Iterator[RankGroup]:
    """Ranks that end in the given ways."""
    from tests.support.ranks.described_rank import WAYS_FILE  # with Horovod, which not all have

    folder.mkdir()
    (folder / WAYS_FILE).write_text(json.dumps(ways))
    lock = os.open(folder, os.O_RDONLY)
    spec = RankSpec(
        module=RANK_MODULE,
        run_path=folder,
        num_ranks=len(ways),
        threads=threads,
        stall_warning_s=60,
        stall_shutdown_s=120,
        lock_descriptor=lock,
        store_file=folder / "meeting",
    )
    try:
        with RankGroup(spec, fork_server) as ranks:
            yield ranks
    finally:
        os.close(lock)


def run_to_the_end(ranks: RankGroup) -> list[tuple[int, str]]:
    """Lines of all ranks."""
    lines = []
    while ranks.has_output:
        lines += ranks.read_lines(0.2)
    return lines


def be_driver(folder: Path) -> None:
    """Run ranks that would stay for ever."""
    with (
        ForkServer([RANK_MODULE], folder) as fork_server,
        group(folder / "run", fork_server, "sleep", "sleep") as ranks,
    ):
        run_to_the_end(ranks)


if __name__ == "__main__":
    be_driver(Path(sys.argv[1]))
