"""Ranks that a bench runs to their end."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

from tasks.training.launch.fork_server import allowed_environment, guarded_command
from tasks.training.launch.rendezvous import rank_variables, rendezvous_server

NUM_RANKS = 2
STALL_S = 60


def run_ranks(module: str, path: Path) -> None:
    """Run two single-thread ranks of `python -m module path` on Horovod.

    Raises:
        RuntimeError: one of them failed.
    """
    with rendezvous_server(NUM_RANKS) as port, ExitStack() as guards:
        ranks = [
            guards.enter_context(
                subprocess.Popen(
                    guarded_command("-m", module, str(path)),
                    cwd=path,
                    env={
                        **allowed_environment(os.environ),
                        **rank_variables(rank, NUM_RANKS, port, STALL_S, 2 * STALL_S),
                        "OMP_NUM_THREADS": "1",
                    },
                    stdin=subprocess.DEVNULL,
                )
            )
            for rank in range(NUM_RANKS)
        ]
    if any(rank.returncode for rank in ranks):
        codes = [rank.returncode for rank in ranks]
        raise RuntimeError(f"ranks of {module} ended with {codes}; what they said is above")
