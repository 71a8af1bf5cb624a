from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.telemetry import DeviceTelemetry, EnergyUse
from tasks.training.telemetry.config import TelemetryConfig
from tasks.training.telemetry.energy import (
    ALL,
    DeviceHistory,
    DeviceSample,
    EnergyCounter,
    NvmlReader,
    energy_use,
    is_visible,
    open_nvml,
    open_rapl,
    run_cost,
)
from tests.support.training.timed_ranks import RANGE_UJ, library, not_supported, zone


def test_rapl_adds_packages_and_memory_and_leaves_out_what_holds_them(tmp_path: Path) -> None:
    zones = [
        zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000),
        zone(tmp_path, "intel-rapl:0:0", "core", 500),
        zone(tmp_path, "intel-rapl:0:1", "dram", 2_000_000),
        zone(tmp_path, "intel-rapl:1", "package-1", 3_000_000),
        zone(tmp_path, "intel-rapl:2", "psys", 4_000_000),
    ]
    meter, told = open_rapl(tmp_path)
    assert meter is not None
    assert told == ""
    assert meter.joules() == 0
    for number, folder in enumerate(zones):
        before = int((folder / "energy_uj").read_text())
        (folder / "energy_uj").write_text(str(before + 1_000_000 * 10**number))
    assert meter.joules() == 1 + 100 + 1000
    assert meter.told.startswith("RAPL counters of dram, package-0, package-1")


def test_rapl_counts_over_its_range(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    meter, _ = open_rapl(tmp_path)
    assert meter is not None
    (package / "energy_uj").write_text("1999999")
    assert meter.joules() == pytest.approx(3.0)
    (package / "energy_uj").write_text("2999999")
    assert meter.joules() == pytest.approx(4.0)


@given(
    st.integers(2, 1000).flatmap(
        lambda range_: st.tuples(st.just(range_), st.lists(st.integers(0, range_), max_size=20))
    )
)
def test_a_counter_gains_what_was_used_whatever_its_range(case: tuple[int, list[int]]) -> None:
    range_, used = case
    total, counter = 0, EnergyCounter(0, range_)
    for gain in used:
        total += gain
        counter.add(total % (range_ + 1))
    assert counter.counted == total


def test_a_counter_without_a_range_goes_on_after_a_reset() -> None:
    counter = EnergyCounter(1000)
    for reading in (1500, 20, 30):
        counter.add(reading)
    assert counter.counted == 500 + 20 + 10


@pytest.mark.parametrize("broken", ["no zone at all", "no number"])
def test_a_host_without_readable_counters_says_so(tmp_path: Path, broken: str) -> None:
    if broken == "no number":
        zone(tmp_path, "intel-rapl:0", "package-0", 0)
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("")
    meter, told = open_rapl(tmp_path)
    assert meter is None
    assert "RAPL counters" in told


def device(energy_j: float | None) -> DeviceTelemetry:
    return DeviceTelemetry(
        index=0, name="one", utilisation_mean=None, utilisation_max=None, peak_memory_bytes=None,
        temperature_max_c=None, power_mean_w=None, energy_j=energy_j,
    )  # fmt: skip


def test_nothing_measured_is_nothing_known() -> None:
    energy = energy_use(TelemetryConfig(), None, "no RAPL here", [], 100.0)
    assert energy == EnergyUse(joules=None, known_by="no RAPL here", estimated=False)
    assert run_cost(TelemetryConfig(price_per_kwh=1.0), energy, 10.0, 1) is None


def test_an_estimate_is_marked_and_says_how_it_was_made() -> None:
    energy = energy_use(TelemetryConfig(watts_per_core=12.5), None, "no RAPL here", [], 100.0)
    assert energy.joules == 1250
    assert energy.estimated
    assert energy.known_by == "estimated: 12.5 W for each of 100 CPU seconds, because no RAPL here"


def test_a_meter_is_preferred_to_an_estimate() -> None:
    energy = energy_use(TelemetryConfig(watts_per_core=12.5), 77.0, "RAPL", [], 100.0)
    assert (energy.joules, energy.estimated) == (77.0, False)


def test_devices_add_to_the_processor() -> None:
    energy = energy_use(TelemetryConfig(), 77.0, "RAPL", [device(23.0), device(None)], 1.0)
    assert energy.joules == 100.0
    assert energy.known_by == "NVML of 1 device(s); RAPL"


def test_cost_is_energy_and_hours_of_hosts() -> None:
    prices = TelemetryConfig(price_per_kwh=0.25, price_per_node_hour=3.6, currency="OMR")
    cost = run_cost(prices, EnergyUse(joules=7.2e6, known_by="RAPL"), 500.0, 2)
    assert cost is not None
    assert cost.energy_part == pytest.approx(0.5)
    assert cost.node_part == pytest.approx(1.0)
    assert (cost.amount, cost.currency) == (pytest.approx(1.5), "OMR")


def test_cost_of_unknown_energy_is_that_of_the_hosts_alone() -> None:
    prices = TelemetryConfig(price_per_kwh=0.25, price_per_node_hour=3.6)
    cost = run_cost(prices, EnergyUse(joules=None, known_by="none"), 1000.0, 1)
    assert cost is not None
    assert cost.energy_part is None
    assert cost.amount == pytest.approx(1.0)


def test_answers_are_turned_into_our_units() -> None:
    assert NvmlReader(library(), ALL).read()[1] == DeviceSample(
        index=1, name="a device", utilisation=0.75, memory_bytes=3, temperature_c=61,
        power_w=250.0, energy_mj=5_000_000,
    )  # fmt: skip


def test_what_a_device_does_not_tell_is_none() -> None:
    [sample, _] = NvmlReader(library(not_supported), ALL).read()
    assert sample.energy_mj is None
    assert sample.power_w == 250.0


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(ALL, [0, 1]), ("1", [1]), ("0,1", [0, 1]), ("", []), ("GPU-1a", [1]), ("-1", [])],
)
def test_only_devices_that_the_ranks_may_use_are_read(visible: str, seen: list[int]) -> None:
    assert [sample.index for sample in NvmlReader(library(), visible).read()] == seen


def test_an_index_is_not_taken_for_the_start_of_a_uuid() -> None:
    assert not is_visible(3, "1GPU", "1")


def test_a_host_without_the_library_says_so() -> None:
    reader, told = open_nvml(ALL)
    if reader is not None:
        reader.close()
        pytest.skip("this host has NVIDIA devices")
    assert told.startswith("NVML cannot be used (")


@pytest.mark.gpu
def test_a_real_device_tells_its_memory_power_and_temperature() -> None:
    reader, told = open_nvml(ALL)
    if reader is None:
        pytest.skip(told)
    try:
        samples = reader.read()
    finally:
        reader.close()
    assert samples
    for seen in samples:
        assert seen.name
        assert seen.memory_bytes is not None
        assert seen.power_w is None or 0 < seen.power_w < 2000
        assert seen.temperature_c is None or 0 < seen.temperature_c < 120


def sample(power_w: float, energy_mj: int | None, memory: int = 5) -> DeviceSample:
    return DeviceSample(0, "a device", 0.5, memory, 60.0, power_w, energy_mj)


def test_energy_is_the_devices_counter_where_it_has_one() -> None:
    history = DeviceHistory("a device")
    history.add(sample(100.0, 7000))
    history.add(sample(100.0, 9500, memory=9))
    summary = history.summary(0)
    assert summary.energy_j == 2.5
    assert summary.peak_memory_bytes == 9
    assert (summary.utilisation_mean, summary.power_mean_w) == (0.5, 100.0)


def test_a_device_that_tells_nothing_has_no_energy() -> None:
    history = DeviceHistory("a device")
    history.add(DeviceSample(0, "a device", None, None, None, None, None))
    summary = history.summary(0)
    assert summary.energy_j is None
    assert summary.utilisation_max is None
