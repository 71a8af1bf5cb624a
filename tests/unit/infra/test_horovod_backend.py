"""Horovod's source is changed exactly or not at all; what a build for GPUs needs."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    """The backend, loaded by its path: its folder is no package, as PEP 517 wants it."""
    path = ROOT / "infra" / "horovod" / "horovod_backend.py"
    spec = importlib.util.spec_from_file_location("horovod_backend", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(backend: ModuleType, tmp_path: Path) -> Path:
    """A tree in which every fix finds what it expects, each occurrence on a numbered line."""
    for fix in backend.fixes():
        path = tmp_path / fix.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as stream:
            stream.writelines(f"{number}: {fix.old}\n" for number in range(fix.occurrences))
    return tmp_path


def test_every_fix_has_a_reason_and_is_applied_once_where_it_says(
    backend: ModuleType, source: Path
) -> None:
    backend.apply_fixes(source)
    assert len(backend.fixes()) == 18
    for fix in backend.fixes():
        assert fix.reason
        assert fix.old != fix.new
        text = (source / fix.file).read_text()
        assert text.count(fix.new) == (1 if fix.only_last else fix.occurrences)
        if fix.only_last:
            assert f"{fix.occurrences - 1}: {fix.new}" in text
            assert f"0: {fix.old}" in text
    with pytest.raises(RuntimeError, match=r"found 0 x .*, expected 1"):
        backend.apply_fixes(source)


def test_needed_flags_stay_when_the_caller_has_some_and_jobs_of_an_outer_make_do_not(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = backend.build_environment({"CXXFLAGS": "-O3", "HOROVOD_GPU": "CUDA", "MAKEFLAGS": ""})
    assert seen["CXXFLAGS"] == "-include cstdint -include stdexcept -include string -O3"
    assert (seen["LDFLAGS"], seen["HOROVOD_GPU"], seen["HOROVOD_WITH_GLOO"]) == ("-s", "CUDA", "1")
    for name in ("MAKEFLAGS", "MAKELEVEL", "_PYPROJECT_HOOKS_BUILD_BACKEND"):
        monkeypatch.setenv(name, "w")
    outer = backend.outer_environment()
    assert not [name for name in outer if name.startswith(("MAKE", "_PYPROJECT"))]
    assert backend.build_environment(outer)["MAKEFLAGS"] == f"-j{backend.num_jobs()}"


@pytest.fixture
def nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PyTorch for CUDA 13 with its NCCL, and a toolkit that fits."""
    folder, nvcc = tmp_path / "nvidia" / "nccl", tmp_path / "bin" / "nvcc"
    for file in (folder / "include/nccl.h", folder / "lib/libnccl.so.2", nvcc):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.1, V13.1.80'\n")
    nvcc.chmod(0o755)
    spec = ModuleSpec("nvidia.nccl", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return folder


def test_a_wheel_for_gpus_links_the_nccl_that_pytorch_brings(
    backend: ModuleType, nccl: Path, tmp_path: Path
) -> None:
    asked = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(tmp_path)}
    seen = backend.whole_environment(asked, tmp_path / "link")
    assert seen["HOROVOD_GPU"] == "CUDA"
    assert seen["HOROVOD_NCCL_INCLUDE"] == str(nccl / "include")
    assert seen["HOROVOD_NCCL_LIB"] == str(tmp_path / "link")
    assert seen["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90,100"
    assert seen["HOROVOD_WITH_GLOO"] == seen["HOROVOD_WITH_PYTORCH"] == "1"
    assert seen["CUDA_HOME"] == str(tmp_path)  # where PyTorch's extensions find libcudart
    on_path = {"HOROVOD_GPU_OPERATIONS": "NCCL", "PATH": str(tmp_path / "bin")}
    assert backend.gpu_environment(on_path, tmp_path / "path")["CUDA_HOME"] == str(tmp_path)
    assert (tmp_path / "link/libnccl.so").resolve() == nccl / "lib/libnccl.so.2"
    # An older toolkit is not asked for what it does not know; the caller's choice wins.
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("13.1", "12.6"))
    torch.version.cuda = "12.6"
    older = backend.gpu_environment(asked, tmp_path / "older")
    assert older["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    chosen = asked | {"HOROVOD_BUILD_CUDA_CC_LIST": "90"}
    seen = backend.whole_environment(chosen, tmp_path / "third")
    assert seen["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
    assert "HOROVOD_GPU" not in backend.whole_environment({"PATH": "/bin"}, tmp_path / "cpu")


@pytest.mark.parametrize("lacking", ["PyTorch for CUDA", "toolkit", "NCCL", "another toolkit"])
def test_a_build_for_gpus_that_cannot_succeed_is_refused_with_what_was_found(
    backend: ModuleType, nccl: Path, tmp_path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking in ("PyTorch for CUDA", "another toolkit"):
        monkeypatch.setattr(torch.version, "cuda", "12.6" if "another" in lacking else None)
    elif lacking == "toolkit":
        (tmp_path / "bin" / "nvcc").unlink()
    else:
        (nccl / "lib" / "libnccl.so.2").unlink()
    with pytest.raises(RuntimeError, match=r"needs a PyTorch built for CUDA.*found PyTorch"):
        backend.gpu_environment({"CUDA_HOME": str(tmp_path)}, tmp_path / "link")
    with pytest.raises(RuntimeError, match="HOROVOD_GPU_OPERATIONS=MPI is not supported"):
        backend.whole_environment({"HOROVOD_GPU_OPERATIONS": "MPI"}, tmp_path / "c")
