from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.launch.pinning import Cores, cores_near_gpu, node_of_gpu, parse_cpu_list

GPU = "0000:3b:00.0"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two sockets of four physical cores, two threads each: node 0 has 0-3 and 8-11."""
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", cores)
    for core in range(16):
        path = tmp_path / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        write(path, f"{core % 8},{core % 8 + 8}")
    write(tmp_path / f"bus/pci/devices/{GPU}/numa_node", "1")
    return tmp_path


def shares(cores: Cores, local_size: int, threads: int) -> list[frozenset[int]]:
    found = [cores.of_rank(rank, local_size, threads) for rank in range(local_size)]
    return [share for share in found if share is not None]


def test_ranks_get_physical_cores_of_their_own_on_one_memory_node(sysfs: Path) -> None:
    cores = Cores.of_host(set(range(16)), sysfs)
    assert shares(cores, 2, 4) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert shares(cores, 8, 1) == [{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}]


def test_threads_of_one_rank_share_a_physical_core_when_all_are_taken(sysfs: Path) -> None:
    cores = Cores.of_host(set(range(16)), sysfs)
    assert shares(cores, 4, 4) == [{0, 8, 1, 9}, {4, 12, 5, 13}, {2, 10, 3, 11}, {6, 14, 7, 15}]


def test_a_rank_spans_two_nodes_only_where_it_must(sysfs: Path) -> None:
    cores = Cores.of_host(set(range(8)), sysfs)
    assert shares(cores, 2, 3) == [{0, 1, 2}, {4, 5, 6}]
    assert cores.of_rank(0, 1, 8) == set(range(8))


@pytest.mark.parametrize(("local_size", "threads"), [(1, 4), (2, 2), (4, 1), (1, 17), (17, 1)])
def test_few_ranks_and_too_many_are_left_to_the_scheduler(
    sysfs: Path, local_size: int, threads: int
) -> None:
    assert Cores.of_host(set(range(16)), sysfs).of_rank(0, local_size, threads) is None


def test_only_allowed_cores_are_given(sysfs: Path) -> None:
    cores = Cores.of_host({1, 5, 9}, sysfs)
    assert cores.number == 3
    assert shares(cores, 2, 1) == [{1}, {5}]


def test_a_host_that_says_nothing_is_one_node(tmp_path: Path) -> None:
    assert Cores.of_host({3, 0, 2, 1}, tmp_path).nodes == (((0,), (1,), (2,), (3,)),)


def test_this_host_can_be_read() -> None:
    allowed = os.sched_getaffinity(0)
    assert Cores.of_host(allowed).number == len(allowed)


@given(
    nodes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    sharing=st.integers(1, 2),
    local_size=st.integers(1, 12),
    threads=st.integers(1, 8),
)
def test_no_core_is_given_twice_and_every_rank_gets_its_number(
    nodes: list[int], sharing: int, local_size: int, threads: int
) -> None:
    numbers = iter(range(1000))
    cores = Cores(
        tuple(tuple(tuple(next(numbers) for _ in range(sharing)) for _ in range(n)) for n in nodes)
    )
    found = shares(cores, local_size, threads)
    needed = local_size * threads
    if not cores.num_physical // 2 < needed <= cores.number:
        assert found == []
        return
    assert [len(share) for share in found] == [threads] * local_size
    assert len(frozenset().union(*found)) == needed


def test_the_memory_node_of_a_gpu_and_its_cores_are_found(sysfs: Path) -> None:
    assert node_of_gpu(GPU, sysfs) == 1
    assert node_of_gpu("00000000:3B:00.0", sysfs) == 1  # as NVML writes it
    assert cores_near_gpu(GPU, {0, 4, 5}, sysfs) == {4, 5}
    assert cores_near_gpu(GPU, {0, 1}, sysfs) is None


def test_a_gpu_on_a_host_of_one_node_has_none(sysfs: Path) -> None:
    write(sysfs / f"bus/pci/devices/{GPU}/numa_node", "-1")
    assert node_of_gpu(GPU, sysfs) is None
    assert cores_near_gpu("0000:af:00.0", {0}, sysfs) is None


@pytest.mark.parametrize(
    ("text", "cores"), [("", set()), ("0", {0}), ("0-2,7,9-10", {0, 1, 2, 7, 9, 10})]
)
def test_cpu_lists_are_parsed(text: str, cores: set[int]) -> None:
    assert parse_cpu_list(text) == cores
