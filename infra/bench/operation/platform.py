"""From nothing to a platform that is ready, and what it costs while nothing runs.

The platform is started on a new state folder and ports of its own, with the deployments of this
project, and ended after the measurement. Its idle cost is CPU time of all its processes over some
minutes, and their proportional set sizes, so that shared pages count once.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from infra.bench.figures import Measured, at_most, seconds
from infra.bench.parts import Bench, wait_until
from infra.orchestration.client import read_password
from infra.platform.api import UNFINISHED, PrefectApi
from infra.platform.files import PlatformFiles, read_endpoint
from tasks.kernel.settings import PROJECT_ROOT

LIMIT_S = 900
ANY_PORTS = "--port=0 --mlflow-port=0 --serving-port=0 --serving-grpc-port=0".split()


def figures(bench: Bench) -> Measured:
    """Seconds to ready, idle CPU and memory."""
    home = bench.folder / "home"
    try:
        ready_s = seconds(lambda: _command(home, "up", *ANY_PORTS))
        up = at_most("platform from nothing to ready, s", ready_s, 60, _load())
        return [up, *_idle_figures(home, *bench.size((30.0, 180.0), (1.0, 5.0)))]
    finally:
        _command(home, "down", "--now")


def _idle_figures(home: Path, settling_s: float, idle_s: float) -> Measured:
    files = PlatformFiles(home)
    endpoint = read_endpoint(files)
    assert endpoint
    _let_nothing_run(PrefectApi(endpoint.api_url, read_password(files.folder)))
    time.sleep(settling_s)
    supervisor = psutil.Process(endpoint.pid)
    members = [supervisor, *supervisor.children(recursive=True)]
    before, begun = _by_name(members, _cpu_s), time.monotonic()
    time.sleep(idle_s)
    after, seconds = _by_name(members, _cpu_s), time.monotonic() - begun
    percents = {name: 100 * (after[name] - before[name]) / seconds for name in after}
    sizes = _by_name(members, lambda member: member.memory_full_info().pss / 1e6)
    taken = f"over {seconds:.0f} s: {_largest(percents, '.1f')}; {_load()}"
    held, gigabytes = f"MB: {_largest(sizes, '.0f')}", sum(sizes.values()) / 1e3
    return [
        at_most("platform idle, % of a core", sum(percents.values()), 5, taken),
        at_most("platform idle, GB", gigabytes, 1.2, held),
    ]


def _largest(shares: dict[str, float], form: str) -> str:
    """The four largest, in words."""
    names = sorted(shares, key=lambda name: -shares[name])[:4]
    return ", ".join(f"{name} {shares[name]:{form}}" for name in names)


def _let_nothing_run(api: PrefectApi) -> None:
    """Pause all pools and wait for what a schedule or a sweep has started meanwhile."""
    pools = [str(pool["name"]) for pool in api.pools()]
    for pool in pools:
        api.pause_pool(pool, paused=True)
    wait_until(lambda: not api.runs(UNFINISHED, pools), "no run is left", LIMIT_S, pause_s=1)


def _by_name(
    members: list[psutil.Process], measure: Callable[[psutil.Process], float]
) -> dict[str, float]:
    found = {}
    for member in members:
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            found[_name(member)] = measure(member)
    return found


def _cpu_s(member: psutil.Process) -> float:
    return float(sum(member.cpu_times()[:2]))


def _name(member: psutil.Process) -> str:
    line = " ".join(member.cmdline())
    words = ("guard.py", "create_prefect", "create_mlflow", ".worker ", "serving", "supervise")
    return f"{next((word for word in words if word in line), 'other')} {member.pid}"


def _load() -> str:
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def _command(home: Path, *arguments: str) -> None:
    """Without a guard: what `up` starts stays."""
    line = [sys.executable, "-m", "falaj", "--home", str(home), *arguments]
    subprocess.run(line, cwd=PROJECT_ROOT, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
