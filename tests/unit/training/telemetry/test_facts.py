from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.training.config import TrainingConfig
from tasks.training.telemetry.diagnosis import JobFacts
from tasks.training.telemetry.host import computes_bf16, hottest, look_at_host


class Reading:
    def __init__(self, current: float) -> None:
        self.current = current


def test_facts_come_from_the_configuration_and_the_host() -> None:
    config = TrainingConfig.model_validate(
        {"global_batch_size": 512, "strategy": {"precision": "bf16", "accumulation_steps": 2}}
    )
    facts = JobFacts.of(config, num_ranks=2, threads_per_rank=1, reading_mode="stream")
    assert (facts.num_ranks, facts.threads_per_rank, facts.num_hosts) == (2, 1, 1)
    assert (facts.global_batch_size, facts.accumulation_steps) == (512, 2)
    assert (facts.precision, facts.reading_mode) == ("bf16", "stream")
    assert facts.num_cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("vendor", "flags", "has"),
    [
        ("AuthenticAMD", "fpu avx512_bf16 sse", True),
        ("GenuineIntel", "fpu avx512_bf16 sse", False),
        ("GenuineIntel", "fpu avx512_bf16 amx_bf16", True),
        ("GenuineIntel", "fpu avx512f", False),
        ("", None, False),
    ],
)
def test_bf16_is_read_from_the_processors_flags(
    tmp_path: Path, vendor: str, flags: str | None, has: bool
) -> None:
    info = tmp_path / "cpuinfo"
    described = f"vendor_id : {vendor}\nflags : {flags}\n" if flags else ""
    info.write_text(f"processor : 0\n{described}")
    assert computes_bf16(info) is has


def test_only_a_processors_sensors_count() -> None:
    sensors = {"nvme": [Reading(90.0)], "k10temp": [Reading(55.0), Reading(61.5)]}
    assert hottest(sensors) == 61.5
    assert hottest({"nvme": [Reading(90.0)]}) is None
    assert hottest({}) is None


def test_counters_of_the_host_only_rise() -> None:
    first, second = look_at_host(), look_at_host()
    assert second.busy_s + second.idle_s >= first.busy_s + first.idle_s
    assert second.loopback_bytes >= first.loopback_bytes
