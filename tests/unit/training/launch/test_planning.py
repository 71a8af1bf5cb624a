"""The plan of a run follows from its configuration: no load and no timing changes a model."""

from __future__ import annotations

import logging

import pytest

from tasks.training.config import TrainingConfig
from tasks.training.launch.host import Host
from tasks.training.launch.planning import plan_ranks


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
    assert plan_ranks(config(**changes), host).num_ranks == ranks


def test_threads_are_the_cores_divided_unless_they_are_given() -> None:
    host = Host(num_cores=8, num_gpus=0)
    assert plan_ranks(config(), host).threads_per_rank == 8
    assert plan_ranks(config(launch={"ranks": 3}), host).threads_per_rank == 2
    assert plan_ranks(config(launch={"ranks": 16}), host).threads_per_rank == 1
    assert plan_ranks(config(launch={"threads_per_rank": 5}), host).threads_per_rank == 5


def test_the_plan_reads_as_words() -> None:
    host = Host(num_cores=4, num_gpus=0)
    assert str(plan_ranks(config(), host)) == "1 rank x 4 threads"
    assert str(plan_ranks(config(launch={"ranks": 4}), host)) == "4 ranks x 1 thread"


def test_gpus_that_stay_idle_are_told_with_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan_ranks(config(device="cuda", launch={"ranks": 2}), Host(num_cores=8, num_gpus=2))
        assert not caplog.records
        plan_ranks(config(device="cuda"), Host(num_cores=8, num_gpus=4))
    assert "launch.ranks=4" in caplog.text
