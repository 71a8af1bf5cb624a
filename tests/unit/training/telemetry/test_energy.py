from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.telemetry import DeviceTelemetry, EnergyUse
from tasks.training.telemetry.config import TelemetryConfig
from tasks.training.telemetry.energy import (
    EnergyCounter,
    PowerIntegral,
    energy_use,
    open_rapl,
    run_cost,
)
from tests.support.training.timed_ranks import RANGE_UJ, zone


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


def test_energy_of_a_power_line_is_the_area_under_it() -> None:
    integral = PowerIntegral()
    integral.add(0.0, 100.0)
    assert integral.joules is None
    integral.add(2.0, 200.0)
    integral.add(3.0, 0.0)
    assert integral.joules == pytest.approx(300 + 100)


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
