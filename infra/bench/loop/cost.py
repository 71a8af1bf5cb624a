"""Measure whole commands: wall time, and peak resident memory of the process tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tasks.kernel.settings import PROJECT_ROOT

SAMPLE_S = 0.5
"""Each sample walks the page tables of the whole tree: ten a second took a seventh of a core."""
FIRST_RUN = "first-run.json"
"""Beside the state folder of a loop: what its first run took."""


@dataclass(frozen=True)
class Cost:
    """What one command took."""

    wall_s: float
    peak_bytes: int


def run_measured(
    arguments: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Cost:
    """Run `python <arguments>` from the project's root, with these variables or this process's own.

    Memory is the largest sum of proportional set sizes over the command and all its descendants,
    sampled twice a second; shared pages count once.

    Raises:
        RuntimeError: it failed.
    """
    started = time.monotonic()
    with log.open("ab") as output:
        process = psutil.Popen(
            [sys.executable, *arguments],
            cwd=PROJECT_ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**(environment or os.environ), "PYTHONPATH": str(PROJECT_ROOT)},
        )
        peak = 0
        while True:
            peak = max(peak, tree_bytes(process))
            with suppress(psutil.TimeoutExpired):
                process.wait(SAMPLE_S)
                break
    wall_s = time.monotonic() - started
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}:\n{tail}")
    return Cost(wall_s, peak)


def tree_bytes(process: psutil.Process) -> int:
    """Proportional set size of a process and its descendants, in bytes."""
    total = 0
    for member in [process, *_children(process)]:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def write_cost(cost: Cost, file: Path) -> None:
    """For another process."""
    file.write_text(json.dumps(asdict(cost)))


def read_cost(file: Path) -> Cost:
    """What `write_cost` has written."""
    return Cost(**json.loads(file.read_text()))
