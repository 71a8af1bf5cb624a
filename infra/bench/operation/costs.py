"""Whether the ledger of costs is whole: its CPU seconds to those of the loop's control group.

A loop, and once more with nothing changed, each in a control group of its own (cpuacct of cgroup
v1, cpu.stat of v2). Where none can be made, the kernel's sum of all descendants that were waited
for is taken instead, and the evidence says so. What Python takes to leave a process, some two
seconds with all libraries loaded, counts to no run.
"""

import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from infra.bench.figures import Measured, at_least, at_most, children_cpu_s
from infra.bench.loop import run_measured
from infra.bench.parts import Bench
from infra.bench.running import loop_environment
from tasks.costs.ledger import CostLedger
from tasks.kernel.settings import Settings

ROOTS = {"/sys/fs/cgroup/cpuacct": "cpuacct.usage", "/sys/fs/cgroup": "cpu.stat"}
IN_GROUP = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.argv[2], sys.argv[2:])"


def figures(bench: Bench) -> Measured:
    """The ledger's sum of each loop to the group's."""
    home, log, group = bench.folder / "home", bench.folder / "log.txt", _new_group()
    environment = loop_environment(bench)
    home.mkdir()
    words = ["-m", "falaj", "--home", str(home), "run"]
    if group is not None:
        words = ["-c", IN_GROUP, str(group / "cgroup.procs"), sys.executable, *words]
    found: Measured = []
    by = "descendants that were waited for" if group is None else f"control group {group.parent}"
    try:
        for loop in ("whole loop", "unchanged rerun"):
            began, before = datetime.now(UTC), _cpu_s(group)
            run_measured(words, log, environment)
            took_s = _cpu_s(group) - before
            ledger = CostLedger(Settings.from_environment({"FALAJ_HOME": str(home)}).metadata_url)
            noted_s = sum(entry.use.cpu_s for entry in ledger.entries(began))
            label, evidence = f"{loop}: ledger to control group, CPU", f"of {took_s:.1f} s, by {by}"
            found.append(at_least(f"{label}, at least", noted_s / took_s, 0.98, evidence))
            found.append(at_most(f"{label}, at most", noted_s / took_s, 1.02, evidence))
    finally:
        if group is not None:
            group.rmdir()
    return found


def _new_group() -> Path | None:
    for root, file in ROOTS.items():
        group = Path(root) / f"falaj-costs-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if (group / file).exists():
                return group
            group.rmdir()
    return None


def _cpu_s(group: Path | None) -> float:
    if group is None:
        return children_cpu_s()
    if (group / "cpuacct.usage").exists():
        return int((group / "cpuacct.usage").read_text()) / 1e9
    return int((group / "cpu.stat").read_text().split()[1]) / 1e6
