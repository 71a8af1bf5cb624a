from __future__ import annotations

from pathlib import Path

import pytest

from tasks.training.config import TrainingConfig
from tasks.training.launch import probe
from tasks.training.launch.config import LaunchConfig
from tasks.training.launch.host import Host
from tasks.training.launch.probe import Measured, RankPlan, candidates, choose, decide_ranks
from tasks.training.launch.probe_job import Layout, ProbeJob
from tasks.training.strategies.config import StrategyConfig

HOST = Host(cpu="a processor", num_cores=4, num_gpus=0)
Outcome = dict[Layout, float | None] | float


def job(**changes: object) -> ProbeJob:
    long_run = ProbeJob(
        category_sizes=(10, 300),
        num_numbers=40,
        rows_per_step=2048,
        num_steps=1_000_000,
        training=TrainingConfig(),
        strategy=StrategyConfig(),
    )
    return long_run.model_copy(update=changes)


class FakeMeasurement:
    """Stands in for `measure`: gives what a test wants and counts its calls."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.num_calls = 0

    def __call__(self, *_: object) -> Outcome:
        self.num_calls += 1
        return self.outcome


@pytest.fixture
def measurement(monkeypatch: pytest.MonkeyPatch) -> FakeMeasurement:
    fake = FakeMeasurement({Layout(1, 4): 100.0, Layout(2, 2): 90.0, Layout(4, 1): 120.0})
    monkeypatch.setattr(probe, "measure", fake)
    monkeypatch.setattr(probe, "busy_share", lambda _: 0.0)
    return fake


def decide(folder: Path, device: str = "cpu", host: Host = HOST, **launch: object) -> RankPlan:
    return decide_ranks(job(), LaunchConfig.model_validate(launch), device, host, folder)


def layout(plan: RankPlan) -> tuple[int, int]:
    return plan.num_ranks, plan.threads_per_rank


def test_what_is_configured_is_not_measured(tmp_path: Path, measurement: FakeMeasurement) -> None:
    assert layout(decide(tmp_path, ranks=3)) == (3, 1)
    assert layout(decide(tmp_path, ranks=3, threads_per_rank=7)) == (3, 7)
    assert measurement.num_calls == 0


def test_there_is_a_rank_for_each_gpu(tmp_path: Path, measurement: FakeMeasurement) -> None:
    plan = decide(tmp_path, "cuda", Host("a processor", 32, 8))
    assert layout(plan) == (8, 4)
    assert plan.reason == "one for each of 8 GPU(s)"
    assert layout(decide(tmp_path, "cuda", Host("a processor", 2, 0))) == (1, 2)
    assert measurement.num_calls == 0


def test_one_core_is_not_divided(tmp_path: Path, measurement: FakeMeasurement) -> None:
    assert layout(decide(tmp_path, host=Host("a processor", 1, 0))) == (1, 1)
    assert measurement.num_calls == 0


def test_a_short_run_gets_one_rank_with_all_cores(
    tmp_path: Path, measurement: FakeMeasurement
) -> None:
    short = job(num_steps=10)
    plan = decide_ranks(short, LaunchConfig(), "cpu", HOST, tmp_path)
    assert layout(plan) == (1, 4)
    assert "training takes at most about" in plan.reason
    assert measurement.num_calls == 0


def test_a_run_that_shows_itself_short_gets_one_rank_and_nothing_is_kept(
    tmp_path: Path, measurement: FakeMeasurement
) -> None:
    measurement.outcome = 19.0
    plan = decide(tmp_path)
    assert layout(plan) == (1, 4)
    assert "about 19 s" in plan.reason
    assert list(tmp_path.iterdir()) == []


def test_the_fastest_is_taken_and_kept_by_content(
    tmp_path: Path, measurement: FakeMeasurement
) -> None:
    plan = decide(tmp_path)
    assert layout(plan) == (4, 1)
    assert plan.reason == (
        "1 rank x 4 threads: 100 rows/s; 2 ranks x 2 threads: 90 rows/s; 4 ranks x 1 thread: 120 "
        "rows/s; 20% faster"
    )
    assert decide(tmp_path) == plan
    assert measurement.num_calls == 1
    decide(tmp_path, host=Host("another processor", 4, 0))
    decide_ranks(job(rows_per_step=64), LaunchConfig(), "cpu", HOST, tmp_path)
    assert measurement.num_calls == 3
    decide_ranks(job(num_steps=2_000_000), LaunchConfig(), "cpu", HOST, tmp_path)
    assert measurement.num_calls == 3  # as fast as the shorter run


def test_a_damaged_result_is_measured_again(tmp_path: Path, measurement: FakeMeasurement) -> None:
    plan = decide(tmp_path)
    next(tmp_path.iterdir()).write_text("{")
    assert decide(tmp_path) == plan
    assert measurement.num_calls == 2


def test_what_was_measured_on_a_busy_machine_is_used_and_not_kept(
    tmp_path: Path, measurement: FakeMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "busy_share", lambda _: 0.8)
    plan = decide(tmp_path)
    assert layout(plan) == (4, 1)
    assert plan.reason.endswith("not kept, since other programs took 80% of the processor")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("speeds", "taken"),
    [((100.0, 104.0), 0), ((100.0, 105.0), 1), ((100.0, 80.0), 0), ((100.0, None), 0)],
)
def test_more_ranks_must_be_clearly_faster(speeds: tuple[float | None, ...], taken: int) -> None:
    measured = [
        Measured(num_ranks=ranks, threads_per_rank=2 // ranks, rows_per_s=speed)
        for ranks, speed in zip((1, 2), speeds, strict=True)
    ]
    plan = choose(measured, min_gain=0.05)
    assert plan.num_ranks == measured[taken].num_ranks
    assert plan.measured == tuple(measured)


def test_a_candidate_that_failed_is_said_to_have() -> None:
    plan = choose(
        [
            Measured(num_ranks=1, threads_per_rank=2, rows_per_s=5000),
            Measured(num_ranks=2, threads_per_rank=1, rows_per_s=None),
        ],
        min_gain=0.05,
    )
    assert str(plan) == (
        "1 rank x 2 threads; 1 rank x 2 threads: 5,000 rows/s; 2 ranks x 1 thread: failed; none is "
        "5% faster"
    )


@pytest.mark.parametrize(
    ("cores", "most", "smallest", "expected"),
    [
        (1, 8, 1, [(1, 1)]),
        (2, 8, 1, [(1, 2), (2, 1)]),
        (12, 8, 1, [(1, 12), (2, 6), (4, 3), (8, 1)]),
        (8, 2, 1, [(1, 8), (2, 4)]),
        (8, 8, 2, [(2, 4), (4, 2), (8, 1)]),
        (2, 8, 4, [(4, 1)]),
    ],
)
def test_candidates_use_all_cores_in_powers_of_two(
    cores: int, most: int, smallest: int, expected: list[tuple[int, int]]
) -> None:
    found = candidates(cores, most, smallest)
    assert [(each.num_ranks, each.threads) for each in found] == expected


def test_the_guess_grows_with_work_and_shrinks_with_cores() -> None:
    assert job().seconds_at_most(2) > job().seconds_at_most(8)
    assert job(num_steps=2_000_000).seconds_at_most(4) == 2 * job().seconds_at_most(4)
    assert job(rows_per_step=4096).seconds_at_most(4) > job().seconds_at_most(4)
