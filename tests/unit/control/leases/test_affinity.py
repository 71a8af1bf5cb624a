from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import pytest

from tasks.control.leases.affinity import NUMA_LIBRARY, applied, variables_of
from tasks.control.leases.devices import GPU, CoreSet, Gpu, HostDevices, hardware_classes
from tasks.control.leases.placement import Grant
from tasks.control.leases.repository import LEASE_VARIABLE, processes_of_lease
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until
from tests.support.platform.lease_devices import host

ONE = min(os.sched_getaffinity(0))


def test_only_leased_gpus_are_shown_by_uuid_and_threads_are_counted() -> None:
    grant = Grant(gpus={"GPU-a": tuple(range(20)), "MIG-b": (0,)})
    assert variables_of(grant, "m")["CUDA_VISIBLE_DEVICES"] == "GPU-a,MIG-b"
    assert variables_of(Grant(cores=(2, 3)), "m") == {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "2",
        LEASE_VARIABLE: "m",
    }


def test_all_threads_and_all_that_they_start_are_confined_and_freed_again() -> None:
    before, go, cores = os.sched_getaffinity(0), threading.Event(), list[set[int]]()

    def look() -> None:
        go.wait(30)
        cores.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=look)
    thread.start()
    with applied(Grant(cores=(ONE,)), "m", host()) as affinity:
        go.set()
        thread.join(30)
        program = "import os; print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
        started = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert str(affinity).startswith(f"cores {ONE}; GPUs: none")
    assert cores == [{ONE}]
    assert started.stdout == f"{{{ONE}}} 1\n"
    assert os.sched_getaffinity(0) == before
    assert LEASE_VARIABLE not in os.environ


def test_what_was_set_before_is_set_again_after_a_failure() -> None:
    environment = {"OMP_NUM_THREADS": "7"}

    def fail() -> None:
        with applied(Grant(cores=(ONE,)), "m", host(), environment):
            assert environment["OMP_NUM_THREADS"] == "1"
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert environment == {"OMP_NUM_THREADS": "7"}


def test_memory_comes_from_the_node_of_the_cores() -> None:
    library = _numa_library()
    two = HostDevices(
        core_sets=(
            CoreSet(node=0, physical=((ONE,),)),
            CoreSet(node=1, physical=((ONE + 1,),)),
        )
    )

    def policy() -> int:
        mode = ctypes.c_int()
        assert library.get_mempolicy(ctypes.byref(mode), None, ctypes.c_ulong(0), None, 0) == 0
        return mode.value

    with applied(Grant(cores=(ONE,)), "m", two) as affinity:
        assert affinity.memory == "of node 0 while it has some"
        assert policy() == 1
    assert policy() == 0


def _numa_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(NUMA_LIBRARY)
    except OSError as exc:
        pytest.skip(f"no memory can be bound here: {exc}")


def test_where_memory_cannot_be_bound_it_is_said() -> None:
    with applied(Grant(cores=(ONE,)), "m", host()) as affinity:
        assert "one memory node" in affinity.memory
    far = HostDevices(
        core_sets=(CoreSet(node=700, physical=((ONE,),)), CoreSet(node=1, physical=((ONE + 1,),)))
    )
    with applied(Grant(cores=(ONE,)), "m", far) as affinity:
        assert "refuses to bind memory" in affinity.memory or "not installed" in affinity.memory


def test_what_runs_under_a_lease_is_found_by_its_mark() -> None:
    child = subprocess.Popen(["sleep", "600"], env={LEASE_VARIABLE: "1f2e"})
    try:
        wait_until(lambda: processes_of_lease("1f2e") == [child.pid], "the mark")
        assert processes_of_lease("1f2") == []
    finally:
        child.kill()
        child.wait()
    assert processes_of_lease("1f2e") == []


def test_every_host_serves_cpu_and_one_with_a_usable_gpu_serves_gpu() -> None:
    assert hardware_classes()[0] == "cpu"
    some = Gpu(uuid="GPU-a", name="NVIDIA H200", memory_bytes=1)
    assert HostDevices(core_sets=(), gpus=(some,)).classes == ("cpu", GPU)
    assert host().classes == ("cpu",)


def test_leases_need_no_prefect_and_no_pytorch() -> None:
    program = (
        "import sys; sys.modules['prefect'] = sys.modules['torch'] = None; "
        "import tasks.control.leases.leases, tasks.control.leases.affinity"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PROJECT_ROOT)
