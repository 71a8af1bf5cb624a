import os
from pathlib import Path
from typing import Any

import pytest

from tasks.contracts.hardware import PriceList
from tasks.training.telemetry.meters import ProcessorMeter
from tasks.training.telemetry.sampler import SPENT, TelemetrySampler
from tasks.training.telemetry.step_clock import StepClock
from tests.support.host.processes import wait_until
from tests.support.training.timed_ranks import write_clock


def sampled(folder: Path, **options: Any) -> TelemetrySampler:
    prices = options.pop("prices", PriceList(watts_per_core=10))
    options.setdefault("processor", ProcessorMeter(folder / "no meter"))
    return TelemetrySampler(folder, prices, **options)


def test_a_rank_is_known_by_its_newest_clock_wherever_it_runs(tmp_path: Path) -> None:
    with sampled(tmp_path) as sampler:
        write_clock(tmp_path, 0, 7, host="elsewhere", elapsed_s=2.0, cpu_s=1.0)
        sampler.sample()
        write_clock(tmp_path, 0, 7, host="elsewhere", elapsed_s=4.0, cpu_s=4.0)
        sampler.sample()
        write_clock(tmp_path, 0, 8, host="elsewhere", elapsed_s=5.0, cpu_s=9.0)  # another process
        sampler.sample()
    [rank] = sampler.result().ranks
    assert (rank.busy_cores_max, rank.cpu_s, rank.num_rows) == (1.5, 9.0, 6400)


def test_what_cannot_be_measured_is_estimated_with_a_reason(tmp_path: Path) -> None:
    with sampled(tmp_path) as sampler:
        pass
    result = sampler.result()
    assert (result.energy.joules, result.energy.estimated) == (0, True)
    assert result.energy.known_by.endswith("because this host shows no RAPL counters")
    assert result.ranks == ()
    assert result.host.num_cores == os.cpu_count()


def test_what_earlier_attempts_took_is_added(tmp_path: Path) -> None:
    for _ in range(2):
        with sampled(tmp_path) as sampler:
            write_clock(tmp_path, 0, 1, host="elsewhere")
            sampler.sample()
    result = sampler.result()
    assert result.num_attempts == 2
    assert result.energy.joules == pytest.approx(2 * 80)
    assert result.energy.estimated


def test_files_of_an_earlier_attempt_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    write_clock(tmp_path, 5, os.getpid())
    (tmp_path / "trace-00005.json.gz").write_text("")
    with sampled(tmp_path) as sampler:
        sampler.sample()
    assert sampler.result().ranks == ()
    assert [path.name for path in tmp_path.iterdir()] == [SPENT]


def test_the_thread_samples_a_real_clock(tmp_path: Path) -> None:
    with (
        sampled(tmp_path, every_s=0.1) as sampler,
        StepClock(tmp_path, 0, write_every_s=0.05) as clock,
    ):
        for _ in range(10):
            clock.add_rows(5)
            clock.step()
        wait_until(
            lambda: any(rank.num_rows == 50 for rank in sampler.result().ranks),
            "the sampler has seen the rows",
        )
    assert sampler.result().num_samples > 1
