"""Ranks that a bench runs to their end."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

from tasks.kernel import guard
from tasks.training.launch.rank_group import local_environments

NUM_RANKS = 2


def run_ranks(module: str, path: Path) -> None:
    """Run two single-thread ranks of `python -m module path` on Horovod.

    Raises:
        RuntimeError: one of them failed.
    """
    command = guard.guarded(guard.python("-m", module, str(path)))
    with local_environments(NUM_RANKS, path / "meeting") as environments, ExitStack() as guards:
        ranks = [
            guards.enter_context(
                subprocess.Popen(command, cwd=path, env=environment, stdin=subprocess.DEVNULL)
            )
            for environment in environments
        ]
    if any(rank.returncode for rank in ranks):
        codes = [rank.returncode for rank in ranks]
        raise RuntimeError(f"ranks of {module} ended with {codes}; what they said is above")
