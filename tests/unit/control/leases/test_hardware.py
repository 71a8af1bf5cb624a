from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.deploying.deployments import on_all_classes
from infra.deploying.file import read_prefect_file
from infra.deploying.pools import PoolItem, pool_items
from tasks.contracts.hardware import CLASS_VARIABLE, HardwareClass, InCluster, Needs, read_classes
from tasks.control.leases.devices import Gpu, Host, HostDevices, hardware_classes, read_cpu_flags
from tasks.kernel.errors import ConfigurationError
from tests.support.platform.lease_devices import host

GIB = 1 << 30
H100 = Gpu(uuid="GPU-h", name="NVIDIA H100 80GB HBM3", memory_bytes=79 * GIB)
SMALL = Gpu(uuid="GPU-s", name="NVIDIA A10", memory_bytes=22 * GIB)
SLICE = H100.model_copy(update={"uuid": "MIG-1", "mig_profile": "1g.10gb", "memory_bytes": 9 << 30})


def with_gpus(*gpus: Gpu) -> Host:
    devices = host(4).model_copy(update={"gpus": gpus})
    return Host(devices, frozenset({"amx_tile", "avx2"}), 32 * GIB)


def needs(**requires: Any) -> Needs:
    return Needs.model_validate(requires)


def write(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    (folder / "hardware.yaml").write_text(text)
    return folder


def test_every_host_is_of_cpu_and_one_with_a_usable_gpu_of_gpu(tmp_path: Path) -> None:
    assert hardware_classes(tmp_path)[0] == "cpu"
    shipped = read_classes(tmp_path)
    assert not with_gpus().lacks(shipped["cpu"].requires)
    assert with_gpus().lacks(shipped["gpu"].requires) == ["it has 0 usable NVIDIA GPU(s) of 1"]
    assert not with_gpus(SMALL).lacks(shipped["gpu"].requires)


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        ({"cpu_flags": ["amx_tile", "amx_bf16"]}, "lack amx_bf16"),
        ({"cores": 5}, "4 core(s) of 5"),
        ({"memory_gib": 64}, "32.0 GiB of memory of 64"),
        ({"gpu": {"model": "H100", "count": 3}}, "2 usable NVIDIA GPU(s) (model=H100) of 3"),
        ({"gpu": {"model": "H200"}}, "0 usable"),
        ({"gpu": {"mig_profile": "1g"}}, ""),
        ({"gpu": {"mig_profile": "1g.1"}}, "0 usable"),
    ],
)
def test_a_host_says_what_it_lacks_of_a_class(requires: dict[str, Any], said: str) -> None:
    lacking = with_gpus(H100, SMALL, SLICE).lacks(needs(**requires))
    assert bool(lacking) == bool(said)
    assert said in "; ".join(lacking)


def test_flags_are_read_as_x86_and_arm_name_them(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu amx_tile\n\nprocessor\t: 1\n")
    assert read_cpu_flags(file) == {"fpu", "amx_tile"}
    file.write_text("processor\t: 0\nFeatures\t: sve bf16\n")
    assert read_cpu_flags(file) == {"sve", "bf16"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("cpu-a: {description: a}\ncpu-a: {description: b}\n", "cpu-a is written twice"),
        ({"cpu-a": {"description": "a", "requires": {"tpu": 1}}}, "requires.tpu.*Requirements are"),
        ({"cpu-a": {"description": "a", "requires": {"gpu": {}}}}, "must begin with 'gpu'"),
        ({"tpu-a": {"description": "a"}}, "pattern"),
        *(({f"cpu-{n}": {"description": "a"}}, "cannot name") for n in ("a..b", "a.", 47 * "a")),
        ({"cpu-1": {"description": "a"}}, "cpu-1 is what a further worker of cpu"),
        ({name: {"description": "a"} for name in ("cpu-a", "cpu-a-2")}, "worker of cpu-a"),
        ({"gpu-a": {"description": "a", "requires": {"gpu": {"vendor": "amd"}}}}, "nvidia"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_classes(write(tmp_path, content))


def test_a_run_sees_the_gpus_of_its_class_alone_and_refuses_a_host_that_is_not_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires = {"gpu": {"model": "H100", "mig_profile": "1g"}}
    write(tmp_path, {"gpu-slice": {"description": "Slices.", "requires": requires}})
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    monkeypatch.setenv(CLASS_VARIABLE, "gpu-slice")
    seen = with_gpus(H100, SLICE).devices
    monkeypatch.setattr(HostDevices, "seen", lambda: seen)
    assert HostDevices.of_this_process().gpus == (SLICE,)
    seen = with_gpus(H100).devices
    with pytest.raises(ConfigurationError, match="not of it: it has 0 usable"):
        HostDevices.of_this_process()


def test_a_pool_in_a_cluster_asks_for_the_nodes_and_the_resource_of_its_class() -> None:
    asked = InCluster(node_selector={"a": "b"}, gpu_resource="nvidia.com/mig-1g.10gb")
    own = HardwareClass(description="Slices.", requires=needs(gpu={}), kubernetes=asked)
    *_, pool = pool_items("kubernetes", "falaj:1", {"gpu-slice": own})
    assert isinstance(pool, PoolItem)
    pod = pool.template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert pod["nodeSelector"] == {"a": "b"}
    assert limits["nvidia.com/mig-1g.10gb"] == "{{ gpus }}"
    assert "nvidia.com/gpu" not in limits


def test_each_stage_is_deployed_for_a_further_class_and_converts_what_the_class_says() -> None:
    own = HardwareClass(description="Own.", requires=needs(gpu={}), formats=("onnx-fp16",))
    file = on_all_classes(read_prefect_file(), {"gpu-own": own})
    made = {entry.entrypoint: entry for entry in file.deployments if entry.name == "gpu-own"}
    hardware = made["flows.conversion.conversion_flow"].parameters["hardware"]
    assert (hardware["hardware_class"], hardware["formats"]) == ("gpu-own", ["onnx-fp16"])
    assert "flows.training.training_flow" in made
    wrong = own.model_copy(update={"requires": Needs(), "formats": ("tensorrt-fp16",)})
    with pytest.raises(ConfigurationError, match="tensorrt-fp16, which is for gpu"):
        on_all_classes(read_prefect_file(), {"cpu-own": wrong})
