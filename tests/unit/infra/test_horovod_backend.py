"""Horovod's source is mended exactly or not at all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    """The backend, loaded by its path: its folder is no package, as PEP 517 wants it."""
    path = ROOT / "infra" / "horovod" / "horovod_backend.py"
    spec = importlib.util.spec_from_file_location("horovod_backend", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(backend: ModuleType, tmp_path: Path) -> Path:
    """A tree in which every fix finds what it expects, each occurrence on a numbered line."""
    for fix in backend.FIXES:
        path = tmp_path / fix.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as stream:
            stream.writelines(f"{number}: {fix.old}\n" for number in range(fix.occurrences))
    return tmp_path


def test_every_fix_is_applied_where_it_says(backend: ModuleType, source: Path) -> None:
    backend.apply_fixes(source)
    for fix in backend.FIXES:
        text = (source / fix.file).read_text()
        assert text.count(fix.new) == (1 if fix.only_last else fix.occurrences)
        if fix.only_last:
            assert f"{fix.occurrences - 1}: {fix.new}" in text
            assert f"0: {fix.old}" in text


def test_a_second_application_is_refused(backend: ModuleType, source: Path) -> None:
    backend.apply_fixes(source)
    with pytest.raises(RuntimeError, match=r"found 0 x .*, expected 1"):
        backend.apply_fixes(source)


@pytest.mark.parametrize("surplus", [True, False])
def test_another_number_of_occurrences_is_refused(
    backend: ModuleType, source: Path, surplus: bool
) -> None:
    fix = backend.FIXES[-1]
    path = source / fix.file
    text = path.read_text()
    path.write_text(text + fix.old if surplus else text.replace(fix.old, "", 1))
    found = fix.occurrences + (1 if surplus else -1)
    with pytest.raises(RuntimeError, match=f"found {found} x .*, expected {fix.occurrences}"):
        backend.apply_fixes(source)


def test_the_fixes_are_the_ones_that_are_known_to_be_needed(backend: ModuleType) -> None:
    operations, queue = "horovod/common/operations.cc", "horovod/common/tensor_queue"
    handles = "horovod/torch/handle_manager"
    assert [(fix.file, fix.old.strip().partition("\n")[0]) for fix in backend.FIXES] == [
        ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)"),
        ("CMakeLists.txt", "project(horovod CXX)"),
        ("CMakeLists.txt", "--version-script=${CMAKE_SOURCE_DIR}/horovod.lds"),
        ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)"),
        ("horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_);"),
        ("horovod/common/gloo/gloo_context.cc", "device_attr.iface = gloo_iface_;"),
        (operations, "global_gloo_context.Initialize(ParseGlooIface());"),
        (operations, "// Reset initialization flag"),
        (queue + ".h", "class TensorQueue {"),
        (queue + ".h", "#include <iostream>"),
        (queue + ".cc", "message_queue_.push(std::move(message));"),
        (queue + ".cc", "message_queue_.push(std::move(messages[i]));"),
        (operations, "std::this_thread::sleep_for(sleep_duration);"),
        (handles + ".h", "bool PollHandle(int handle);"),
        (handles + ".h", "std::mutex mutex_;"),
        (handles + ".h", "#include <atomic>"),
        (handles + ".cc", "results_[handle] = std::make_shared<Status>(status);"),
        ("horovod/torch/mpi_ops_v2.cc", "{"),
    ]
    assert all(fix.reason and fix.old != fix.new for fix in backend.FIXES)


def test_the_version_is_the_same_wherever_it_is_written(backend: ModuleType) -> None:
    version = f"{backend.RELEASE}+{backend.LOCAL_VERSION}"
    assert f'version = "{version}"' in (ROOT / "infra/horovod/pyproject.toml").read_text()
    assert f'"horovod=={version}"' in (ROOT / "pyproject.toml").read_text()


def test_needed_flags_stay_when_the_caller_has_some(backend: ModuleType) -> None:
    seen = backend.build_environment({"CXXFLAGS": "-O3", "HOROVOD_GPU": "CUDA", "MAKEFLAGS": ""})
    assert seen["CXXFLAGS"] == "-include cstdint -include stdexcept -include string -O3"
    assert seen["LDFLAGS"] == "-s"
    assert seen["HOROVOD_GPU"] == "CUDA"
    assert seen["HOROVOD_WITH_GLOO"] == "1"


def test_jobs_of_an_outer_make_do_not_slow_the_build(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "w")
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("_PYPROJECT_HOOKS_BUILD_BACKEND", "horovod_backend")
    outer = backend.outer_environment()
    assert not [name for name in outer if name.startswith(("MAKE", "_PYPROJECT"))]
    assert backend.build_environment(outer)["MAKEFLAGS"] == f"-j{backend.num_jobs()}"
    assert backend.num_jobs() >= 1


def test_there_is_no_source_distribution(backend: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="install this folder directly"):
        backend.build_sdist("anywhere")


@pytest.fixture
def nccl(tmp_path: Path) -> Path:
    """NCCL as PyTorch's CUDA wheels bring it."""
    folder = tmp_path / "nvidia" / "nccl"
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def fitting_cuda(backend: ModuleType, place: Path, **changes: object) -> object:
    parts = {
        "pytorch": "2.13.0+cu130",
        "pytorch_cuda": "13.0",
        "toolkit": Path("/usr/local/cuda"),
        "toolkit_version": "13.1",
        "nccl": place,
    }
    return backend.Cuda(**{**parts, **changes})


def test_a_wheel_for_gpus_links_the_nccl_that_pytorch_brings(
    backend: ModuleType, nccl: Path, tmp_path: Path
) -> None:
    seen = backend.gpu_environment(fitting_cuda(backend, nccl), tmp_path / "link")
    assert seen == {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": "/usr/local/cuda",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_NCCL_INCLUDE": str(nccl / "include"),
        "HOROVOD_NCCL_LIB": str(tmp_path / "link"),
        "HOROVOD_BUILD_CUDA_CC_LIST": "80,90,100",
    }
    assert (tmp_path / "link/libnccl.so").resolve() == nccl / "lib/libnccl.so.2"


def test_an_older_toolkit_is_not_asked_for_what_it_does_not_know(
    backend: ModuleType, nccl: Path, tmp_path: Path
) -> None:
    older = fitting_cuda(backend, nccl, pytorch_cuda="12.6", toolkit_version="12.6")
    seen = backend.gpu_environment(older, tmp_path / "link")
    assert seen["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pytorch": "2.13.0+cpu", "pytorch_cuda": None}, r"but 2\.13\.0\+cpu is installed"),
        ({"toolkit_version": None}, "/usr/local/cuda holds no CUDA toolkit"),
        (
            {"toolkit_version": "12.8"},
            "is CUDA 12.8, but PyTorch 2.13.0.cu130 is built for CUDA 13",
        ),
        ({"nccl": None}, "has brought no NCCL"),
        ({"nccl": Path("/nowhere")}, "has brought no NCCL"),
    ],
)
def test_a_build_for_gpus_that_cannot_succeed_is_refused_with_the_reason(
    backend: ModuleType, nccl: Path, tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        backend.gpu_environment(fitting_cuda(backend, nccl, **changes), tmp_path / "link")


def test_what_is_installed_is_found_out(backend: ModuleType, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    assert backend.installed_cuda({"CUDA_HOME": str(tmp_path)}).toolkit_version is None
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.1, V13.1.80'\n")
    nvcc.chmod(0o755)
    seen = backend.installed_cuda({"CUDA_HOME": "/none", "HOROVOD_CUDA_HOME": str(tmp_path)})
    assert (seen.toolkit, seen.toolkit_version) == (tmp_path, "13.1")
    assert seen.pytorch.startswith("2.13.0")


def test_gpus_are_built_for_only_when_asked_and_only_with_nccl(
    backend: ModuleType, nccl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "HOROVOD_GPU" not in backend.whole_environment({"PATH": "/bin"}, tmp_path / "a")
    monkeypatch.setattr(backend, "installed_cuda", lambda _: fitting_cuda(backend, nccl))
    asked = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_BUILD_CUDA_CC_LIST": "90"}
    seen = backend.whole_environment(asked, tmp_path / "b")
    assert seen["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"  # the caller's wins
    assert seen["HOROVOD_WITH_GLOO"] == seen["HOROVOD_WITH_PYTORCH"] == "1"
    with pytest.raises(RuntimeError, match="HOROVOD_GPU_OPERATIONS=MPI is not supported"):
        backend.whole_environment({"HOROVOD_GPU_OPERATIONS": "MPI"}, tmp_path / "c")
