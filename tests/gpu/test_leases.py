"""The GPUs of this host as the leases see them."""

from pathlib import Path

import pytest
import torch

from tasks.control.config import LeaseRequest
from tasks.control.leases.devices import HostDevices, hardware_classes
from tasks.control.leases.repository import LeaseRepository, acquire, applied
from tests.support.host.processes import run_python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def test_every_device_that_cuda_shows_is_found_by_its_uuid() -> None:
    found = HostDevices.of_this_process()
    assert hardware_classes() == ("cpu", "gpu")
    assert found.unusable == ()
    uuids = {
        f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        for index in range(torch.cuda.device_count())
    }
    assert uuids <= {gpu.uuid for gpu in found.gpus} or all(gpu.mig_profile for gpu in found.gpus)


def test_a_class_of_ones_own_is_this_hosts_by_its_device_and_no_other(tmp_path: Path) -> None:
    name = torch.cuda.get_device_name().split()[1]  # as in `NVIDIA H100 80GB HBM3`
    gib = torch.cuda.get_device_properties(0).total_memory >> 30
    classes = "".join(
        f"gpu-{each}: {{description: {each}., requires: {{gpu: {needs}}}}}\n"
        for each, needs in (
            ("here", f"{{model: {name}, memory_gib: {gib // 2}, count: 1}}"),
            ("larger", f"{{model: {name}, memory_gib: {2 * gib}}}"),
            ("other", "{model: of another name}"),
            ("slice", "{mig_profile: 9g}"),
        )
    )
    (tmp_path / "hardware.yaml").write_text(classes)
    assert hardware_classes(tmp_path) == ("cpu", "gpu", "gpu-here")


def test_a_process_under_a_lease_sees_the_leased_device_and_no_other(tmp_path: Path) -> None:
    found = HostDevices.of_this_process()
    wanted = found.gpus[-1]
    request = LeaseRequest(gpus=1, mig_profile=wanted.mig_profile)
    repository = LeaseRepository(tmp_path / "leases")
    with acquire(repository, request, "test") as lease, applied(lease.grant, lease.lease_id):
        program = (
            "import torch; print(torch.cuda.device_count(), torch.ones(3, device='cuda').sum())"
        )
        said = run_python("-c", program, check=True).stdout
    assert said.startswith("1 tensor(3.")
