"""What the command line costs before it does anything: CPU time, which other work changes least.

And how long a check of the flights takes.
"""

import os
import statistics
import subprocess
import sys

from infra.bench.figures import Measured, at_most, children_cpu_s, seconds
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
    line, before = [sys.executable, *words], children_cpu_s()
    subprocess.run(line, cwd=PROJECT_ROOT, stdout=subprocess.DEVNULL, check=True)
    return children_cpu_s() - before
