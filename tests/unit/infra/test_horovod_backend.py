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
    assert [(fix.file, fix.old) for fix in backend.FIXES] == [
        ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)"),
        ("CMakeLists.txt", "project(horovod CXX)"),
        ("CMakeLists.txt", "--version-script=${CMAKE_SOURCE_DIR}/horovod.lds"),
        ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)"),
        ("horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_);"),
        ("horovod/common/gloo/gloo_context.cc", "device_attr.iface = gloo_iface_;"),
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
