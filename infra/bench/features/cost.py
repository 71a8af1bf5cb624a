"""What a piece of work costs the process that does it."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import polars as pl

T = TypeVar("T")


def measured(target: Path, work: Callable[[], T], write: Callable[[T, Path], object]) -> None:
    """Do it, and print its cost as JSON; what it returns is written to `target` afterwards.

    CPU is that of the whole process, threads and kernel included, from the call to its result;
    memory is the highest resident size of the whole process, imports included.
    """
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    result = work()
    after, wall_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - started
    cost = {
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall_s": wall_s,
        "peak_bytes": _peak_bytes(),
    }
    if result is not None:
        write(result, target)
    num_rows = pl.scan_parquet(target).select(pl.len()).collect().item()
    print(json.dumps(cost | {"num_rows": num_rows}))


def _peak_bytes() -> int:
    """Highest resident size of this program; what `getrusage` says includes its parent's."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
