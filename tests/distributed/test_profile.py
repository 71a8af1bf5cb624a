from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tasks.training.config import TrainingConfig
from tasks.training.telemetry.config import TelemetryConfig
from tasks.training.telemetry.diagnosis import JobFacts
from tasks.training.telemetry.meters import ProcessorMeter
from tasks.training.telemetry.profiler import TIMELINE, profile_files
from tasks.training.telemetry.sampler import TelemetrySampler
from tests.support.ranks.rank_programs import run_on_ranks
from tests.support.ranks.slow_ranks import NUM_STEPS, ROWS, WIDTH

JOB = JobFacts(
    TrainingConfig(global_batch_size=2 * ROWS), num_ranks=2, threads_per_rank=1, num_cores=2
)  # fmt: skip


@pytest.mark.slow
def test_a_training_over_a_slow_link_is_measured_diagnosed_and_profiled(tmp_path: Path) -> None:
    config, meter = TelemetryConfig(watts_per_core=10), ProcessorMeter(tmp_path / "no meter")
    with TelemetrySampler(tmp_path, config, processor=meter, every_s=0.2) as sampler:
        run_on_ranks("tests.support.ranks.slow_ranks", tmp_path, 2)
    result = sampler.diagnosed(JOB)
    assert [rank.rank for rank in result.ranks] == [0, 1]
    gradient_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    for rank in result.ranks:
        assert rank.num_rows == NUM_STEPS * ROWS
        assert rank.rows_per_s is not None
        assert rank.wire_bytes >= NUM_STEPS * gradient_bytes
        assert rank.peak_memory_bytes > gradient_bytes
        assert rank.busy_cores_mean is not None
    assert result.energy.estimated
    assert result.energy.joules == pytest.approx(10 * sum(rank.cpu_s for rank in result.ranks))

    assert result.diagnosis is not None
    found = {finding.kind: finding for finding in result.diagnosis.findings}
    assert found["communication"].suggestions.keys() & {"launch.ranks", "global_batch_size"}

    assert "NEGOTIATE_ALLREDUCE" in (tmp_path / TIMELINE).read_text()
    names = [path.name for path in profile_files(tmp_path)]
    assert names == ["trace-00000.json.gz", "trace-00001.json.gz", TIMELINE]
    trace = json.loads(gzip.decompress((tmp_path / names[0]).read_bytes()))
    assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])
