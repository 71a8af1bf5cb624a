"""Start a program on several local ranks that may talk by Horovod and by torch.distributed.

As a program, with a folder, it is a driver of ranks that would stay for ever.
"""

import json
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from infra.bench.parts import wait_until
from tasks.kernel.process import guarded_process
from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.launch.rank_group import RankGroup, local_environments

GRACE_S = 2
LIMIT_S = 280.0
RANK_MODULE = "tests.support.ranks.described_rank"
GONE_WITHIN_S = 20


def run_on_ranks(module: str, folder: Path, num_ranks: int, *arguments: str) -> None:
    """Run `python -m MODULE FOLDER ARGUMENTS` on `num_ranks` guarded ranks until all have ended.

    Raises:
        AssertionError: a rank ended with an error, or not in time; says what all ranks printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store_file = folder / f"store-{uuid.uuid4().hex}"
    command = [sys.executable, "-W", "error", "-m", module, str(folder), *arguments]
    with local_environments(num_ranks, store_file) as environments, ExitStack() as stack:
        logs = [folder / f"rank-{rank}-of-{num_ranks}.log" for rank in range(num_ranks)]
        ranks = []
        for log, environment in zip(logs, environments, strict=True):
            log.unlink(missing_ok=True)
            running = guarded_process(
                command, log, environment, folder=PROJECT_ROOT, grace_s=GRACE_S
            )
            ranks.append(stack.enter_context(running))

        def have_ended() -> bool:
            codes = [process.poll() for process in ranks]
            return None not in codes or any(codes)

        with suppress(TimeoutError):
            wait_until(have_ended, "the end of all ranks, or of a failed one", LIMIT_S)
        codes = [process.poll() for process in ranks]
    said = "\n".join(f"--- rank {rank}\n{log.read_text()}" for rank, log in enumerate(logs))
    assert codes == [0] * num_ranks, f"exit codes {codes}:\n{said}"


@contextmanager
def group(folder: Path, *ways: str, threads: int = 1) -> Iterator[RankGroup]:
    """Ranks that end in the given ways."""
    from tests.support.ranks.described_rank import WAYS_FILE  # with Horovod, which not all have

    folder.mkdir()
    (folder / WAYS_FILE).write_text(json.dumps(ways))
    lock = os.open(folder, os.O_RDONLY)
    try:
        with (
            local_environments(len(ways), folder / "meeting", threads) as environments,
            RankGroup(RANK_MODULE, folder, environments, lock) as ranks,
        ):
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
    with group(folder / "run", "sleep", "sleep") as ranks:
        run_to_the_end(ranks)


if __name__ == "__main__":
    be_driver(Path(sys.argv[1]))
