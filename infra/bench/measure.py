"""Measure whole commands: wall time, and peak resident memory of the process tree."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasks.settings import PROJECT_ROOT

SAMPLE_S = 0.1


@dataclass(frozen=True)
class Cost:
    """What one command took."""

    wall_s: float
    peak_bytes: int


def run_measured(arguments: list[str], log: Path) -> Cost:
    """Run `python <arguments>` from the project's root; raise where it fails.

    Memory is the largest sum of proportional set sizes over the command and all its descendants,
    sampled ten times a second; shared pages count once.
    """
    started = time.monotonic()
    with log.open("ab") as output:
        process = psutil.Popen(
            [sys.executable, *arguments],
            cwd=PROJECT_ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, tree_bytes(process))
            time.sleep(SAMPLE_S)
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
