import os
import threading
from pathlib import Path

import pytest

from tasks.control.leases.devices import core_sets
from tasks.control.leases.placement import Grant
from tasks.control.leases.repository import LEASE_VARIABLE, applied, variables_of
from tasks.kernel.cores import core_limit
from tests.support.host.processes import run_python

ONE = min(os.sched_getaffinity(0))


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """A `/sys` with two memory nodes of two physical cores, each core shared by two."""
    for node, cores in enumerate(["0-1,4-5", "2-3,6-7"]):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", cores)
    for core in range(8):
        shared = f"{core % 4},{core % 4 + 4}"
        write(tmp_path / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", shared)
    return tmp_path


def test_cores_are_grouped_by_memory_node_and_physical_core(two_nodes: Path) -> None:
    first, second = core_sets(set(range(8)), two_nodes)
    assert (first.node, first.physical) == (0, ((0, 4), (1, 5)))
    assert (second.node, second.cores) == (1, (2, 6, 3, 7))


def test_only_cores_that_the_process_may_use_are_there_and_none_is_lost(two_nodes: Path) -> None:
    (only,) = core_sets({2, 6, 3}, two_nodes)
    assert (only.node, only.physical) == (1, ((2, 6), (3,)))
    unlisted = core_sets({0, 9}, two_nodes)[-1]
    assert (unlisted.node, unlisted.cores) == (1, (9,))
    found = {core for each in core_sets(os.sched_getaffinity(0)) for core in each.cores}
    assert found == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("listing", "files", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("0::/a/b", {"a/cpu.max": "800000 100000", "a/b/cpu.max": "50000 100000"}, 1),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (
            "4:memory:/x\n1:cpu,cpuacct:/jobs/7",
            {
                "cpu,cpuacct/jobs/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/jobs/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        ("", {}, None),
    ],
)
def test_the_tightest_limit_of_the_control_groups_counts(
    tmp_path: Path, listing: str, files: dict[str, str], cores: int | None
) -> None:
    write(tmp_path / "proc/self/cgroup", listing)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert core_limit(tmp_path / "proc", tmp_path / "sys").num_cores == cores


def test_two_containers_that_call_their_group_alike_are_told_apart(tmp_path: Path) -> None:
    groups = set()
    for space in ("cgroup:[1]", "cgroup:[2]"):
        root = tmp_path / space
        write(root / "proc/self/cgroup", "0::/")
        write(root / "sys/fs/cgroup/cpu.max", "200000 100000")
        (root / "proc/self/ns").mkdir()
        (root / "proc/self/ns/cgroup").symlink_to(space)
        groups.add(core_limit(root / "proc", root / "sys").group)
    assert groups == {"cgroup:[1]:/", "cgroup:[2]:/"}


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
        started = run_python("-c", program, check=True)
    assert cores == [{ONE}]
    assert started.stdout == f"{{{ONE}}} 1\n"
    assert os.sched_getaffinity(0) == before
    assert LEASE_VARIABLE not in os.environ
