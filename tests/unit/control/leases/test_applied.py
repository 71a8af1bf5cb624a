from __future__ import annotations

import os
import subprocess
import sys
import threading

from tasks.control.leases.devices import Gpu, HostDevices, hardware_classes
from tasks.control.leases.placement import Grant
from tasks.control.leases.repository import LEASE_VARIABLE, applied, variables_of
from tests.support.platform.lease_devices import host

ONE = min(os.sched_getaffinity(0))


def test_only_leased_gpus_are_shown_by_uuid_and_threads_are_counted() -> None:
    grant = Grant(gpus=("GPU-a", "MIG-b"))
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
    with applied(Grant(cores=(ONE,)), "m"):
        go.set()
        thread.join(30)
        program = "import os; print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
        started = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
    assert cores == [{ONE}]
    assert started.stdout == f"{{{ONE}}} 1\n"
    assert os.sched_getaffinity(0) == before
    assert LEASE_VARIABLE not in os.environ


def test_every_host_serves_cpu_and_one_with_a_usable_gpu_serves_gpu() -> None:
    assert hardware_classes()[0] == "cpu"
    some = Gpu(uuid="GPU-a", name="NVIDIA H200", memory_bytes=1)
    assert HostDevices(core_sets=(), gpus=(some,)).classes == ("cpu", "gpu")
    assert host().classes == ("cpu",)
