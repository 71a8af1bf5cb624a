from pathlib import Path

import pytest

from tasks.contracts.hardware import PriceList
from tasks.contracts.telemetry import DeviceTelemetry, EnergyUse
from tasks.training.telemetry import meters
from tests.support.training.timed_ranks import RANGE_UJ, library, not_supported, zone


def test_processor_energy_adds_packages_and_memory_over_their_range(tmp_path: Path) -> None:
    zones = [
        zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000),
        zone(tmp_path, "intel-rapl:0:0", "core", 500),
        zone(tmp_path, "intel-rapl:0:1", "dram", 2_000_000),
        zone(tmp_path, "intel-rapl:2", "psys", 4_000_000),
    ]
    meter = meters.ProcessorMeter(tmp_path)
    assert meter.joules() == 0
    for number, folder in enumerate(zones):
        (folder / "energy_uj").write_text(
            str((int((folder / "energy_uj").read_text()) + 2_000_000 * 10**number) % (RANGE_UJ + 1))
        )
    assert meter.joules() == meter.joules() == 2 + 200
    assert meter.known_by.startswith("RAPL counters of dram, package-0")


def test_counters_that_are_absent_or_vanish_leave_the_energy_unknown(tmp_path: Path) -> None:
    absent = meters.ProcessorMeter(tmp_path)
    assert absent.joules() is None
    assert "no RAPL counters" in absent.known_by
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = meters.ProcessorMeter(tmp_path)
    (package / "energy_uj").unlink()
    assert meter.joules() is meter.joules() is None
    assert "could not be read to the end" in meter.known_by
    assert "cannot be read" in meters.ProcessorMeter(tmp_path).known_by


DEVICE = DeviceTelemetry(
    index=0, name="one", utilisation_mean=None, utilisation_max=None, peak_memory_bytes=None,
    temperature_max_c=None, power_mean_w=None, energy_j=23.0,
)  # fmt: skip
SILENT = DEVICE.model_copy(update={"energy_j": None})


@pytest.mark.parametrize(
    ("watts", "processor_j", "devices", "expected"),
    [
        (12.5, 77.0, (), EnergyUse(joules=77.0, known_by="RAPL")),
        (12.5, 77.0, (DEVICE, SILENT), EnergyUse(joules=100, known_by="NVML of 1 device(s); RAPL")),
        (12.5, None, (), EnergyUse(
            joules=1250, estimated=True,
            known_by="estimated: 12.5 W for each of 100 CPU seconds, because RAPL",
        )),
    ],
    ids=["a meter before an estimate", "devices", "an estimate"],
)  # fmt: skip
def test_energy_is_measured_else_estimated(
    watts: float,
    processor_j: float | None,
    devices: tuple[DeviceTelemetry, ...],
    expected: EnergyUse,
) -> None:
    prices = PriceList(watts_per_core=watts)
    assert meters.energy_use(prices, processor_j, "RAPL", devices, 100.0) == expected


def test_money_is_that_of_energy_cores_and_devices() -> None:
    prices = PriceList(kwh=0.25, core_hour=3.6, gpu_hour=36)
    assert prices.money(500.0, 50.0, 7.2e6) == pytest.approx(1.5)


def test_devices_are_summed_up_in_our_units() -> None:
    readings = iter([5_000_000, 7_500_000])
    closed: list[bool] = []
    meter = meters.DeviceMeter("1", library(energy=lambda _: next(readings), closed=closed))
    meter.sample()
    meter.sample()
    meter.close()
    assert meter.summaries() == (
        DeviceTelemetry(
            index=1, name="a device", utilisation_mean=0.75, utilisation_max=0.75,
            peak_memory_bytes=3, temperature_max_c=61, power_mean_w=250.0, energy_j=2500,
        ),
    )  # fmt: skip
    assert closed
    silent = meters.DeviceMeter(None, library(not_supported))
    silent.sample()
    assert [device.energy_j for device in silent.summaries()] == [None, None]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, [0, 1]), ("1", [1]), ("0,1", [0, 1]), ("", []), ("GPU-1a", [1]), ("-1", [])],
)
def test_only_devices_that_the_ranks_may_use_are_read(visible: str | None, seen: list[int]) -> None:
    assert [i for i in range(2) if meters.is_visible(i, f"GPU-{i}abc", visible)] == seen
