"""CPU time of several calls beside each other, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WARM_UP_CALLS = 5
NUM_TURNS = 25
TURN_S = 0.05


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds of a call, by name and turn."""

    by_name: Mapping[str, NDArray[np.float64]]

    def share(self, name: str, other: str) -> float:
        """CPU time of `name` as a share of that of `other`: median of the turns' ratios."""
        return float(np.median(self.by_name[name] / self.by_name[other]))

    def milliseconds(self, name: str) -> float:
        """CPU milliseconds of a call, median of the turns."""
        return 1e3 * float(np.median(self.by_name[name]))


def cpu_times(calls: Mapping[str, Callable[[], object]], num_turns: int = NUM_TURNS) -> CpuTimes:
    """CPU time (user and system, all threads of this process) of calls that take turns.

    The order of the turns rotates. Each repeats its call for about `TURN_S` of CPU, at least once.
    """
    repeats = {name: _repeats(call) for name, call in calls.items()}
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(num_turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(_turn(calls[name], repeats[name]))
    return CpuTimes({name: np.array(seconds) for name, seconds in found.items()})


def _repeats(call: Callable[[], object]) -> int:
    for _ in range(WARM_UP_CALLS):
        call()
    return max(1, round(TURN_S / max(_turn(call, 3), 1e-7)))


def _turn(call: Callable[[], object], repeats: int) -> float:
    call()  # not counted: brings code and weights back into the caches
    started = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - started) / repeats
