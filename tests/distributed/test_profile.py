from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from tasks.contracts.telemetry import Finding, TrainingTelemetry
from tasks.training.config import TrainingConfig
from tasks.training.telemetry.config import TelemetryConfig
from tasks.training.telemetry.diagnosis import JobFacts
from tasks.training.telemetry.meters import ProcessorMeter
from tasks.training.telemetry.profiler import TIMELINE, profile_files
from tasks.training.telemetry.sampler import TelemetrySampler
from tests.support.ranks.rank_programs import run_on_ranks
from tests.support.ranks.slow_ranks import LARGE, LARGE_WIDTH, NUM_STEPS, ROWS, SLOW_READER, STARVED

pytestmark = pytest.mark.slow

JOB = JobFacts(
    TrainingConfig(global_batch_size=2 * ROWS), num_ranks=2, threads_per_rank=1, num_cores=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slow")


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, TrainingTelemetry]:
    """Telemetry of each of the slow trainings, sampled while they ran."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a rank can only be starved beside one that is not: needs two cores")
    samplers = {
        name: TelemetrySampler(
            folder / name,
            TelemetryConfig(watts_per_core=10),
            processor=ProcessorMeter(folder / "no meter"),
            every_s=0.2,
        )
        for name in (SLOW_READER, LARGE, STARVED)
    }
    for name in samplers:
        (folder / name).mkdir()
    with samplers[SLOW_READER], samplers[LARGE], samplers[STARVED]:
        run_on_ranks("tests.support.ranks.slow_ranks", folder, 2)
    return {name: sampler.diagnosed(JOB) for name, sampler in samplers.items()}


def findings(measured: TrainingTelemetry) -> tuple[Finding, ...]:
    assert measured.diagnosis is not None
    return measured.diagnosis.findings


def test_a_slow_reader_is_input_bound(measured: dict[str, TrainingTelemetry]) -> None:
    first = findings(measured[SLOW_READER])[0]
    assert first.kind == "input", first


def test_a_large_network_with_few_rows_behind_a_slow_link_is_communication_bound(
    measured: dict[str, TrainingTelemetry],
) -> None:
    found = {finding.kind: finding for finding in findings(measured[LARGE])}
    assert "communication" in found, found
    suggestions = found["communication"].suggestions
    assert suggestions.keys() & {"launch.ranks", "global_batch_size"}


def test_a_rank_that_shares_its_core_is_named(measured: dict[str, TrainingTelemetry]) -> None:
    first = findings(measured[STARVED])[0]
    assert first.kind == "imbalance", first
    assert "rank 1 on" in first.evidence
    assert "something else runs there" in first.evidence
    assert first.suggestions == {"launch.ranks": 1}


def test_rows_bytes_memory_and_energy_of_every_rank_are_measured(
    measured: dict[str, TrainingTelemetry],
) -> None:
    large = measured[LARGE]
    assert [rank.rank for rank in large.ranks] == [0, 1]
    gradient_bytes = 4 * 2 * (LARGE_WIDTH * LARGE_WIDTH + LARGE_WIDTH)
    for rank in large.ranks:
        assert rank.num_rows == NUM_STEPS * ROWS
        assert rank.rows_per_s is not None
        assert rank.wire_bytes >= NUM_STEPS * gradient_bytes
        assert rank.peak_memory_bytes > gradient_bytes
        assert rank.busy_cores_mean is not None
    assert large.energy.estimated
    assert large.energy.joules == pytest.approx(10 * sum(rank.cpu_s for rank in large.ranks))


@pytest.mark.usefixtures("measured")
def test_the_profile_of_both_ranks_is_kept(folder: Path) -> None:
    assert "NEGOTIATE_ALLREDUCE" in (folder / LARGE / TIMELINE).read_text()
    names = [path.name for path in profile_files(folder / LARGE)]
    assert names == ["trace-00000.json.gz", "trace-00001.json.gz", TIMELINE]
    trace = json.loads(gzip.decompress((folder / LARGE / names[0]).read_bytes()))
    assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])
