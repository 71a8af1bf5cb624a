"""What NVML tells, from recorded structures; tests/gpu has the real thing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tasks.control.leases.devices import Found, find_gpus
from tasks.kernel.errors import ConfigurationError

GIB = 1 << 30


@dataclass
class Device:
    """One device as NVML describes it."""

    uuid: str
    name: str = "NVIDIA H200"
    memory: int = 141 * GIB
    is_cut: bool | None = False
    slices: dict[int, Any] = field(default_factory=dict)
    bus: str = "00000000:3B:00.0"


def recorded(*devices: Device, refuses: Exception | None = None) -> Any:
    """NVML's functions over recorded devices; all else (errors, constants) is the library's."""

    def start() -> None:
        if refuses:
            raise refuses

    def mig_mode(device: Device) -> list[int]:
        if device.is_cut is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(device.is_cut)] * 2

    def slice_at(device: Device, index: int) -> Any:
        if index not in device.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return device.slices[index]

    functions = {
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(devices),
        "nvmlDeviceGetHandleByIndex": devices.__getitem__,
        "nvmlDeviceGetName": lambda device: device.name,
        "nvmlDeviceGetUUID": lambda device: device.uuid,
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(total=device.memory),
        "nvmlDeviceGetPciInfo": lambda device: SimpleNamespace(busId=device.bus),
        "nvmlDeviceGetMigMode": mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": slice_at,
    }
    return SimpleNamespace(**(vars(pynvml) | functions))


def slice_of(number: int, profile: str) -> Device:
    return Device(f"MIG-{number}", f"NVIDIA H200 MIG {profile}", 16 * GIB)


def look(*devices: Device, environment: Mapping[str, str] | None = None) -> Found:
    return find_gpus(environment or {}, recorded(*devices))


def test_gpus_are_named_by_uuid_with_the_memory_node_they_hang_on(tmp_path: Path) -> None:
    node = tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    (found,) = find_gpus({}, recorded(Device("GPU-a")), sysfs=tmp_path).usable
    assert (found.uuid, found.name, found.node) == ("GPU-a", "NVIDIA H200", 1)
    assert found.memory_bytes == 141 * GIB


def test_a_gpu_in_mig_mode_is_its_slices() -> None:
    cut = Device(
        "GPU-a", is_cut=True, slices={0: slice_of(0, "1g.18gb"), 3: slice_of(3, "2g.35gb")}
    )
    found = look(cut, Device("GPU-b", is_cut=None))
    assert [(gpu.uuid, gpu.mig_profile) for gpu in found.usable] == [
        ("MIG-0", "1g.18gb"),
        ("MIG-3", "2g.35gb"),
        ("GPU-b", None),
    ]
    assert "make slices" in look(Device("GPU-a", is_cut=True)).unusable[0]


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        ("", []),
        ("-1", []),
        ("1", ["GPU-b"]),
        ("1,0", ["GPU-a", "GPU-b"]),
        ("0,-1,1", ["GPU-a"]),
        ("GPU-b", ["GPU-b"]),
        ("GPU-", ["GPU-a", "GPU-b"]),
        ("NoDevFiles", []),
    ],
)
def test_gpus_that_are_hidden_from_the_process_are_said(value: str, uuids: list[str]) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": value}
    found = look(Device("GPU-a"), Device("GPU-b"), environment=environment)
    assert [gpu.uuid for gpu in found.usable] == uuids
    assert all("is hidden" in each for each in found.unusable)
    assert len(found.usable) + len(found.unusable) == 2


def test_counting_devices_of_two_models_is_refused() -> None:
    two = (Device("GPU-a"), Device("GPU-b", "NVIDIA L4"))
    with pytest.raises(ConfigurationError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        look(*two, environment={"CUDA_VISIBLE_DEVICES": "0"})
    ordered = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.uuid for gpu in look(*two, environment=ordered).usable] == ["GPU-a"]


def test_a_host_without_a_driver_has_no_gpu_and_a_broken_one_is_said() -> None:
    for code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        assert find_gpus({}, recorded(refuses=pynvml.NVMLError(code))) == Found()
    mismatch = pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    (unusable,) = find_gpus({}, recorded(refuses=mismatch)).unusable
    assert "NVML refuses to start" in unusable
