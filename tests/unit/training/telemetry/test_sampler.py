from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tasks.contracts.telemetry import PhaseTime
from tasks.training.telemetry.config import TelemetryConfig
from tasks.training.telemetry.energy import ALL, NvmlReader, open_rapl
from tasks.training.telemetry.host import ProcessUse, RankProcesses
from tasks.training.telemetry.sampler import SPENT, Meters, TelemetrySampler, read_spent
from tasks.training.telemetry.step_clock import PHASES, ClockReading, StepClock, clock_path
from tests.support.host.processes import wait_until
from tests.support.training.timed_ranks import library, zone

MODEL = 'the "flights" model\\'
NO_METERS = Meters(told="this host shows no RAPL counters")


def write_clock(folder: Path, rank: int, pid: int, **changes: object) -> None:
    """What a rank's clock would have written."""
    phases = {name: PhaseTime(seconds=2, cpu_s=1, steady_s=2, steady_cpu_s=1) for name in PHASES}
    reading = ClockReading(
        rank=rank, host=socket.gethostname(), pid=pid, phase="compute", elapsed_s=12.0,
        num_steps=50, num_rows=6400, wire_bytes=10_000, steady_steps=47, steady_rows=6000,
        phases=phases, cpu_s=8.0, peak_memory_bytes=123_456_789, major_faults=0, preemptions=4,
    ).model_copy(update=changes)  # fmt: skip
    clock_path(folder, rank).write_text(reading.model_dump_json())


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A rank that has a process of its own and holds some memory in it."""
    program = (
        "import subprocess, sys\n"
        "inner = 'import sys; held = bytearray(60_000_000); print(1, flush=True); sys.stdin.read()'"
        "\n"
        "subprocess.run([sys.executable, '-c', inner])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_a_rank_is_measured_with_all_that_it_started(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS) as sampler:
        write_clock(tmp_path, 0, child.pid, peak_memory_bytes=1)
        sampler.sample()
        sampler.sample()
    [rank] = sampler.result().ranks
    assert rank.peak_memory_bytes > 60_000_000
    assert rank.busy_cores_mean is not None
    assert rank.disk_read_bytes is not None
    assert rank.rows_per_s == pytest.approx(1000)
    assert rank.cpu_s == 8.0, "the clock knows of more CPU time than was sampled"


def test_a_rank_of_another_host_is_known_by_its_clock_alone(tmp_path: Path) -> None:
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS) as sampler:
        write_clock(tmp_path, 1, os.getpid(), host="elsewhere")
        sampler.sample()
    [rank] = sampler.result().ranks
    assert rank.busy_cores_mean is rank.disk_read_bytes is None
    assert rank.peak_memory_bytes == 123_456_789


def test_a_rank_that_is_gone_keeps_what_it_used(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS) as sampler:
        write_clock(tmp_path, 0, gone.pid)
        sampler.sample()
    [rank] = sampler.result().ranks
    assert rank.num_rows == 6400
    assert rank.busy_cores_max is None


def test_a_clock_that_cannot_be_read_is_left_out_until_it_can(tmp_path: Path) -> None:
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS) as sampler:
        write_clock(tmp_path, 0, 1, host="elsewhere")
        clock_path(tmp_path, 1).write_text("{")
        clock_path(tmp_path, 2).mkdir()
        sampler.sample()
        assert [rank.rank for rank in sampler.result().ranks] == [0]
        write_clock(tmp_path, 1, 1, host="elsewhere")
    assert [rank.rank for rank in sampler.result().ranks] == [0, 1]


def test_a_process_id_that_is_given_out_again_takes_nothing_back() -> None:
    seen = RankProcesses()
    seen.add(0.0, {7: ProcessUse(5.0, 10, 0, 0)})
    seen.add(1.0, {7: ProcessUse(0.1, 10, 0, 0)})
    assert seen.busy_cores.mean == 0


def test_what_cannot_be_measured_is_none_with_a_reason(tmp_path: Path) -> None:
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS) as sampler:
        pass
    told = sampler.result()
    assert told.energy.joules is None
    assert told.energy.known_by == "this host shows no RAPL counters"
    assert told.cost is None
    assert told.ranks == ()
    assert told.host.num_cores == os.cpu_count()


def test_the_meters_of_this_host_are_found_or_said_to_be_absent(tmp_path: Path) -> None:
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, devices=ALL) as sampler:
        sampler.sample()
    told = sampler.result()
    assert told.energy.known_by
    assert (told.energy.joules is None) or told.energy.joules >= 0


def test_energy_of_processor_and_devices_is_added_up(tmp_path: Path) -> None:
    package = zone(tmp_path / "powercap", "intel-rapl:0", "package-0", 0)
    rapl, _ = open_rapl(tmp_path / "powercap")
    joules = iter([7_000, 9_000])
    closed: list[bool] = []
    nvml = library(energy=lambda _: next(joules), closed=closed)
    meters = Meters(rapl=rapl, devices=NvmlReader(nvml, "1"))
    run = tmp_path / "run"
    run.mkdir()
    with TelemetrySampler(run, TelemetryConfig(), MODEL, meters=meters) as sampler:
        (package / "energy_uj").write_text("5000000")
        sampler.sample()
    told = sampler.result()
    [device] = told.devices
    assert device.energy_j == 2.0
    assert told.energy.joules == pytest.approx(5.0 + 2.0)
    assert told.energy.known_by.startswith("NVML of 1 device(s); RAPL counters of package-0")
    assert closed


def test_counters_that_vanish_leave_the_energy_unknown(tmp_path: Path) -> None:
    package = zone(tmp_path / "powercap", "intel-rapl:0", "package-0", 0)
    rapl, _ = open_rapl(tmp_path / "powercap")
    run = tmp_path / "run"
    run.mkdir()
    with TelemetrySampler(run, TelemetryConfig(), MODEL, meters=Meters(rapl=rapl)) as sampler:
        (package / "energy_uj").unlink()
        sampler.sample()
    told = sampler.result()
    assert told.energy.joules is None
    assert "could not be read to the end" in told.energy.known_by


def test_what_earlier_attempts_took_is_added(tmp_path: Path) -> None:
    config = TelemetryConfig(watts_per_core=10)
    for _ in range(2):
        with TelemetrySampler(tmp_path, config, MODEL, meters=NO_METERS) as sampler:
            write_clock(tmp_path, 0, 1, host="elsewhere")
            sampler.sample()
    told = sampler.result()
    assert told.num_attempts == 2
    assert told.energy.joules == pytest.approx(2 * 80)
    assert told.energy.estimated
    spent = read_spent(tmp_path)
    assert spent is not None
    assert spent.num_attempts == 2


def test_energy_is_unknown_where_an_attempt_did_not_measure_it(tmp_path: Path) -> None:
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS):
        pass
    config = TelemetryConfig(watts_per_core=10)
    with TelemetrySampler(tmp_path, config, MODEL, meters=NO_METERS) as sampler:
        pass
    told = sampler.result()
    assert told.energy.joules is None
    assert "not known for every attempt" in told.energy.known_by


def test_a_damaged_note_of_earlier_attempts_is_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SPENT).write_text('{"seconds": ')
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS) as sampler:
        pass
    assert sampler.result().num_attempts == 1
    assert "is damaged" in caplog.text


def test_clocks_of_an_earlier_attempt_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    write_clock(tmp_path, 5, os.getpid())
    (tmp_path / "profile-00005.json").write_text("{}")
    with TelemetrySampler(tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS) as sampler:
        sampler.sample()
    assert sampler.result().ranks == ()
    assert [path.name for path in tmp_path.iterdir()] == [SPENT]


def test_the_thread_samples_a_real_clock(tmp_path: Path) -> None:
    with (
        TelemetrySampler(
            tmp_path, TelemetryConfig(), MODEL, meters=NO_METERS, every_s=0.1
        ) as sampler,
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


def scraped(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Name of each sample to label values, in the order of the labels' names, to value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_the_text_file_is_whole_and_holds_the_last_state(tmp_path: Path) -> None:
    run, exported = tmp_path / "night-3", tmp_path / "exported" / "training.prom"
    run.mkdir()
    config = TelemetryConfig(prometheus_textfile=exported, watts_per_core=1)
    meters = Meters(devices=NvmlReader(library(), "0"))
    with TelemetrySampler(run, config, MODEL, meters=meters):
        write_clock(run, 0, 1, host="elsewhere")
    text = exported.read_text()
    metrics = scraped(text)
    own = (MODEL, "0", "night-3")
    assert metrics["falaj_training_steps_total"] == {own: 50}
    assert metrics["falaj_training_rows_total"] == {own: 6400}
    assert metrics["falaj_training_rows_per_second"] == {own: 1000}
    assert metrics["falaj_training_wire_bytes_total"] == {own: 10_000}
    phases = metrics["falaj_training_phase_seconds_total"]
    assert phases[MODEL, "exchange", "0", "night-3"] == 2
    assert metrics["falaj_training_device_power_watts"] == {("0", MODEL, "night-3"): 250}
    assert metrics["falaj_training_energy_joules_total"] == {(MODEL, "night-3"): 8}
    for name in metrics:
        base = name.removesuffix("_total")
        assert f"# HELP {base}" in text
        assert f"# TYPE {base}" in text
    assert list(exported.parent.iterdir()) == [exported]


def test_an_export_that_is_refused_is_told_once_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    config = TelemetryConfig(prometheus_textfile=blocked / "training.prom")
    with TelemetrySampler(tmp_path, config, MODEL, meters=NO_METERS) as sampler:
        sampler.sample()
    assert caplog.text.count("the training goes on") == 1
    assert sampler.result().num_attempts == 1
