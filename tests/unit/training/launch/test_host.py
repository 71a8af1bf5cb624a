from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.config import TrainingConfig
from tasks.training.launch import host
from tasks.training.launch.host import (
    Cores,
    Host,
    cores_near_gpu,
    count_gpus,
    plan_ranks,
)


def test_this_host_has_a_core() -> None:
    seen = Host.of_this_process()
    assert 1 <= seen.num_cores <= len(os.sched_getaffinity(0))


class FakeNvml:
    """A driver that sees some GPUs, or is not there."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int | None) -> None:
        self._count = count

    def nvmlInit(self) -> None:  # noqa: N802
        if self._count is None:
            raise self.NVMLError

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int | None:  # noqa: N802
        return self._count


@pytest.mark.parametrize(
    ("present", "visible", "count"),
    [
        (None, None, 0),
        (4, None, 4),
        (4, "0,2", 2),
        (4, "", 0),
        (4, "-1", 0),
        (1, "0,1", 1),
        (2, "GPU-5f1c,GPU-77aa", 2),
    ],
)
def test_gpus_are_those_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, present: int | None, visible: str | None, count: int
) -> None:
    monkeypatch.setattr(host, "pynvml", FakeNvml(present))
    environment: dict[str, Any] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment) == count


def config(**changes: object) -> TrainingConfig:
    return TrainingConfig.model_validate(changes)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 1),
        ({"launch": {"ranks": 3}}, 3),
        ({"device": "cuda"}, 1),
        ({"strategy": {"name": "tensor-parallel", "tensor_parallel_size": 2}}, 2),
    ],
)
@pytest.mark.parametrize("host", [Host(1, 0), Host(2, 1), Host(64, 8)])
def test_the_same_configuration_has_the_same_ranks_on_every_host(
    changes: dict[str, object], ranks: int, host: Host
) -> None:
    assert plan_ranks(config(**changes), host)[0] == ranks


def test_threads_are_the_cores_divided_unless_they_are_given() -> None:
    host = Host(num_cores=8, num_gpus=0)
    assert plan_ranks(config(), host)[1] == 8
    assert plan_ranks(config(launch={"ranks": 3}), host)[1] == 2
    assert plan_ranks(config(launch={"ranks": 16}), host)[1] == 1
    assert plan_ranks(config(launch={"threads_per_rank": 5}), host)[1] == 5


def test_gpus_that_stay_idle_are_told_with_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan_ranks(config(device="cuda", launch={"ranks": 2}), Host(num_cores=8, num_gpus=2))
        assert not caplog.records
        plan_ranks(config(device="cuda"), Host(num_cores=8, num_gpus=4))
    assert "launch.ranks=4" in caplog.text


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
    assert cores_near_gpu(GPU, {0, 4, 5}, sysfs) == {4, 5}
    assert cores_near_gpu(GPU, {0, 1}, sysfs) is None


def test_a_gpu_on_a_host_of_one_node_has_none(sysfs: Path) -> None:
    write(sysfs / f"bus/pci/devices/{GPU}/numa_node", "-1")
    assert cores_near_gpu(GPU, {0}, sysfs) is None
    assert cores_near_gpu("0000:af:00.0", {0}, sysfs) is None
