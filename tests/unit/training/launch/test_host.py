from pathlib import Path

import pytest

from tasks.kernel.cores import physical_cores_by_node
from tasks.training.config import TrainingConfig
from tasks.training.launch.launcher import plan_ranks
from tasks.training.launch.worker import cores_near_gpu, cores_of_rank


@pytest.mark.parametrize(
    ("changes", "num_cores", "ranks", "threads"),
    [
        ({}, 1, 1, 1),
        ({}, 8, 1, 8),
        ({"launch": {"ranks": 3}}, 2, 3, 1),
        ({"launch": {"ranks": 3}}, 8, 3, 2),
        ({"launch": {"ranks": 16}}, 8, 16, 1),
        ({"launch": {"threads_per_rank": 5}}, 8, 1, 5),
        ({"device": "cuda"}, 64, 1, 64),
    ],
)
def test_ranks_are_as_configured_on_every_host_and_share_its_cores(
    changes: dict[str, object], num_cores: int, ranks: int, threads: int
) -> None:
    assert plan_ranks(TrainingConfig.model_validate(changes), num_cores)[:2] == (ranks, threads)


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


@pytest.mark.parametrize(
    ("allowed", "local_size", "threads", "expected"),
    [
        pytest.param(16, 2, 4, [{0, 1, 2, 3}, {4, 5, 6, 7}], id="physical cores of one node"),
        pytest.param(16, 8, 1, [{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}], id="nodes in turn"),
        pytest.param(
            16, 4, 4, [{0, 8, 1, 9}, {4, 12, 5, 13}, {2, 10, 3, 11}, {6, 14, 7, 15}],
            id="shared when all are taken",
        ),
        pytest.param(8, 2, 3, [{0, 1, 2}, {4, 5, 6}], id="no rank on two nodes"),
        pytest.param(8, 1, 8, [set(range(8))], id="unless it must"),
        *(
            pytest.param(16, size, threads, [], id=f"{size} x {threads} is the scheduler's")
            for size, threads in [(1, 4), (2, 2), (4, 1), (1, 17), (17, 1)]
        ),
    ],
)  # fmt: skip
def test_ranks_get_cores_of_their_own(
    sysfs: Path, allowed: int, local_size: int, threads: int, expected: list[set[int]]
) -> None:
    nodes = list(physical_cores_by_node(set(range(allowed)), sysfs).values())
    shares = [cores_of_rank(nodes, rank, local_size, threads) for rank in range(local_size)]
    assert [share for share in shares if share is not None] == expected


def test_the_memory_node_of_a_gpu_and_its_cores_are_found(sysfs: Path) -> None:
    assert cores_near_gpu(GPU, {0, 4, 5}, sysfs) == {4, 5}
    assert cores_near_gpu(GPU, {0, 1}, sysfs) is None
    write(sysfs / f"bus/pci/devices/{GPU}/numa_node", "-1")
    assert cores_near_gpu(GPU, {0}, sysfs) is None, "a host of one node"
