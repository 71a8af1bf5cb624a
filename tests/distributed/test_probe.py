"""The probe on real ranks: what it measures, and what becomes of ranks that fail in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.errors import TransientError
from tasks.training.config import TrainingConfig
from tasks.training.launch import probe
from tasks.training.launch.config import LaunchConfig
from tasks.training.launch.guard import descendants
from tasks.training.launch.host import Host
from tasks.training.launch.nursery import Nursery
from tasks.training.launch.probe import decide_ranks
from tasks.training.launch.probe_job import Layout, ProbeJob
from tasks.training.launch.probe_measure import PROBE_MODULE, measure
from tasks.training.strategies.config import StrategyConfig
from tests.support.host.processes import wait_until

pytestmark = pytest.mark.slow

READY_WITHIN_S = 120
TWO_CORES = Host(cpu="any", num_cores=2, num_gpus=0)
LAUNCH = LaunchConfig(probe_above_s=0, probe_limit_s=0.5)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery([PROBE_MODULE], tmp_path_factory.mktemp("nursery")) as prepared:
        assert prepared.wait_until_ready(READY_WITHIN_S)
        yield prepared


def job(strategy: str = "horovod") -> ProbeJob:
    return ProbeJob(
        category_sizes=(4, 30),
        num_numbers=3,
        rows_per_step=63,  # an odd number: ranks get unequal parts
        num_steps=1_000_000,
        training=TrainingConfig(hidden_sizes=(16,)),
        strategy=StrategyConfig.model_validate({"name": strategy}),
    )


@pytest.mark.parametrize("strategy", ["horovod", "ddp"])
def test_the_probe_measures_each_candidate_with_real_steps(
    tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(probe, "busy_share", lambda _: 0.0)
    before = set(descendants(os.getpid()))
    plan = decide_ranks(job(strategy), LAUNCH, "cpu", TWO_CORES, tmp_path, nursery)
    assert [(at.num_ranks, at.threads_per_rank) for at in plan.measured] == [(1, 2), (2, 1)]
    assert all(at.rows_per_s is not None and at.rows_per_s > 0 for at in plan.measured)
    assert plan.reason.startswith("1 rank x 2 threads: ")
    wait_until(lambda: set(descendants(os.getpid())) <= before, "no rank of the probe is left")
    assert decide_ranks(job(strategy), LAUNCH, "cpu", TWO_CORES, tmp_path) == plan  # kept


def test_a_run_that_turns_out_short_is_not_weighed(tmp_path: Path, nursery: Nursery) -> None:
    seconds = measure(job(), [Layout(1, 1), Layout(2, 1)], 1e9, 0.5, tmp_path, nursery)
    assert isinstance(seconds, float)
    assert [folder.name for folder in tmp_path.iterdir()] == ["1x1"]


def test_a_candidate_whose_ranks_fail_is_left_out(
    tmp_path: Path, nursery: Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    impossible = Layout(2, 0)  # PyTorch refuses to have no thread
    speeds = measure(job(), [Layout(1, 1), impossible], 0, 0.5, tmp_path, nursery)
    assert isinstance(speeds, dict)
    assert speeds[Layout(1, 1)] is not None
    assert speeds[impossible] is None
    assert f"{impossible} cannot be measured and is left out" in caplog.text


def test_a_probe_whose_first_candidate_fails_says_what_its_rank_said(
    tmp_path: Path, nursery: Nursery
) -> None:
    refused = job().model_copy(update={"category_sizes": (-1,)})
    with pytest.raises(TransientError, match=r"a rank of the probe did not answer.*category_sizes"):
        measure(refused, [Layout(1, 1)], 0, 0.5, tmp_path, nursery)
