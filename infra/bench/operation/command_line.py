"""What the command line costs before it does anything: CPU time, which other work changes least.

And how long a check of the flights takes.
"""

import os
import statistics
import subprocess
import sys

from infra.bench.figures import Measured, at_most, seconds
from infra.bench.parts import Bench
from tasks.kernel.settings import PROJECT_ROOT


def figures(bench: Bench) -> Measured:
    """CPU seconds of `falaj --help`, and as many times those of an empty Python."""
    rounds = bench.size(11, 1)
    empty = statistics.median(_cpu_s("-c", "pass") for _ in range(rounds))
    helped = statistics.median(_cpu_s("-m", "falaj", "--help") for _ in range(rounds))
    imported = statistics.median(_cpu_s("-c", "import falaj") for _ in range(rounds))
    checked = seconds(lambda: _cpu_s("-m", "falaj", "check"))
    evidence = f"median of {rounds}; an empty Python takes {empty:.3f} s"
    return [
        at_most("falaj --help, CPU s", helped, 0.4, evidence),
        at_most("falaj --help to an empty Python, CPU", helped / empty, 15.0, evidence),
        at_most("import falaj, CPU s", imported, 0.3, evidence),
        at_most("falaj check of the flights, s", checked, 10.0, f"{os.cpu_count()} cores"),
    ]


def _cpu_s(*words: str) -> float:
    line = [sys.executable, *words]
    process = subprocess.Popen(line, cwd=PROJECT_ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime
