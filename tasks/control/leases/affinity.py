"""What a lease means for the process that holds it, and for all that it starts.

Cores, environment and memory policy are inherited, so a training's ranks, probes and guards have
them without being told. A share of a GPU below 1 is a promise among those who lease: the driver
slices time evenly among the programs on a device, whatever their shares.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.control.leases.devices import HostDevices
from tasks.control.leases.placement import Grant
from tasks.control.leases.repository import LEASE_VARIABLE

THREADS_OF_THIS = Path("/proc/self/task")
NUMA_LIBRARY = "libnuma.so.1"
# From linux/mempolicy.h. Preferred, not bound: a full node must not kill the program.
MPOL_DEFAULT, MPOL_PREFERRED = 0, 1
BITS_OF_LONG = 64


@dataclass(frozen=True)
class Affinity:
    """What was set for a process, for logs and records.

    Args:
        cores: that its threads, and what they start, may run on; empty: unchanged.
        variables: what was put into its environment.
        memory: where its memory comes from, or why nothing was said about that.
    """

    cores: tuple[int, ...]
    variables: Mapping[str, str]
    memory: str

    def __str__(self) -> str:
        cores = f"cores {','.join(map(str, self.cores))}" if self.cores else "all cores as before"
        gpus = self.variables["CUDA_VISIBLE_DEVICES"] or "none"
        return f"{cores}; GPUs: {gpus}; memory: {self.memory}"


def variables_of(grant: Grant, mark: str) -> dict[str, str]:
    """Environment of a process under a lease; GPUs that it does not hold are hidden from it."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(grant.gpus), LEASE_VARIABLE: mark}
    if grant.cores:
        variables["OMP_NUM_THREADS"] = str(len(grant.cores))
    return variables


@contextmanager
def applied(
    grant: Grant,
    mark: str,
    devices: HostDevices,
    environment: MutableMapping[str, str] | None = None,
) -> Iterator[Affinity]:
    """Confine this process to the devices of a lease; undone when the context is left.

    All threads that the process has are confined, and those that they start.

    Args:
        grant: what is held.
        mark: `Lease.mark`.
        devices: all that there was to choose from.
        environment: where variables are set; `os.environ` where none is given.
    """
    variables = variables_of(grant, mark)
    with ExitStack() as undo:
        target = os.environ if environment is None else environment
        undo.enter_context(_variables_set(target, variables))
        undo.enter_context(_cores_set(grant.cores))
        memory = undo.enter_context(_memory_near(grant.cores, devices))
        yield Affinity(cores=grant.cores, variables=variables, memory=memory)


@contextmanager
def _variables_set(
    environment: MutableMapping[str, str], variables: Mapping[str, str]
) -> Iterator[None]:
    before = {name: environment.get(name) for name in variables}
    environment.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value


@contextmanager
def _cores_set(cores: tuple[int, ...]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    if cores:
        _confine_threads(cores)
    try:
        yield
    finally:
        if cores:
            _confine_threads(before)


def _confine_threads(cores: Iterable[int]) -> None:
    """Set the cores of every thread, until no new one has come meanwhile."""
    wanted = set(cores)
    done: set[int] = set()
    while present := {int(entry.name) for entry in THREADS_OF_THIS.iterdir()} - done:
        for thread in present:
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread, wanted)
        done |= present


@contextmanager
def _memory_near(cores: tuple[int, ...], devices: HostDevices) -> Iterator[str]:
    """Let memory come from the node of the cores, where there are several nodes to choose from.

    It is a matter of the calling thread, and of what is started by it.
    """
    nodes = sorted(each.node for each in devices.core_sets if set(cores) & set(each.cores))
    if not cores or len(devices.core_sets) < 2:
        yield "any; there is one memory node, or no core was leased"
        return
    if len(nodes) > 1:
        yield f"any; the cores are on several memory nodes ({', '.join(map(str, nodes))})"
        return
    refusal = prefer_node(nodes[0])
    yield f"any; {refusal}" if refusal else f"of node {nodes[0]} while it has some"
    if not refusal:
        _set_policy(MPOL_DEFAULT, None)


def prefer_node(node: int) -> str | None:
    """Let this thread's memory come from a node while that has some; why not, if it cannot be."""
    return _set_policy(MPOL_PREFERRED, node)


def _set_policy(policy: int, node: int | None) -> str | None:
    try:
        library = ctypes.CDLL(NUMA_LIBRARY, use_errno=True)
    except OSError:
        return f"{NUMA_LIBRARY} is not installed (on Debian and Ubuntu: libnuma1)"
    length = 0 if node is None else node // BITS_OF_LONG + 1
    mask = (ctypes.c_ulong * max(length, 1))()
    if node is not None:
        mask[node // BITS_OF_LONG] = 1 << node % BITS_OF_LONG
    bits = length * BITS_OF_LONG + 1 if length else 0
    if library.set_mempolicy(policy, mask if length else None, ctypes.c_ulong(bits)):
        return f"the system refuses to bind memory: {os.strerror(ctypes.get_errno())}"
    return None
