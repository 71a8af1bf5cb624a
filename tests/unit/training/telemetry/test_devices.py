from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tasks.training.telemetry.devices import (
    ALL,
    DeviceHistory,
    DeviceSample,
    NvmlReader,
    is_visible,
    open_nvml,
)


class NotSupportedError(Exception):
    pass


def not_supported(_: object) -> float:
    raise NotSupportedError


def library(energy: Callable[[object], float] = lambda _: 5_000_000) -> SimpleNamespace:
    """What a management library of two devices answers, in its units."""
    return SimpleNamespace(
        NVMLError=NotSupportedError,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}abc",
        nvmlDeviceGetName=lambda _: "a device",
        nvmlDeviceGetPowerUsage=lambda _: 250_000,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=75, memory=10),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=8, free=5, used=3),
        nvmlDeviceGetTemperature=lambda _handle, _sensor: 61,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlShutdown=lambda: None,
    )


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


def sample(power_w: float | None, energy_mj: int | None, memory: int = 5) -> DeviceSample:
    return DeviceSample(0, "a device", 0.5, memory, 60.0, power_w, energy_mj)


def test_energy_is_the_devices_counter_where_it_has_one() -> None:
    history = DeviceHistory("a device")
    history.add(0.0, sample(100.0, 7000))
    history.add(10.0, sample(100.0, 9500, memory=9))
    summary = history.summary(0)
    assert summary.energy_j == 2.5
    assert summary.peak_memory_bytes == 9
    assert (summary.utilisation_mean, summary.power_mean_w) == (0.5, 100.0)


def test_energy_is_the_area_under_the_power_where_there_is_no_counter() -> None:
    history = DeviceHistory("a device")
    history.add(0.0, sample(100.0, None))
    history.add(10.0, sample(200.0, None))
    assert history.summary(0).energy_j == 1500.0


def test_a_device_that_tells_nothing_has_no_energy() -> None:
    history = DeviceHistory("a device")
    history.add(0.0, DeviceSample(0, "a device", None, None, None, None, None))
    summary = history.summary(0)
    assert summary.energy_j is None
    assert summary.utilisation_max is None
