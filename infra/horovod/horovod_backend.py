"""PEP 517 backend: fetch the pinned Horovod source, mend it, build a wheel for the installed torch.

Horovod 0.28.1 is the newest release and does not compile against PyTorch 2.13 as published. Two of
the fixes below are for the build; two are defects that hurt a job on Gloo (see each one's reason).
Every fix is an exact replacement that must match an exact number of times, so a different source
cannot be mended by accident.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

RELEASE = "0.28.1"
LOCAL_VERSION = "falaj1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Fix:
    """One exact replacement in the source; `only_last` spares the earlier occurrences."""

    file: str
    old: str
    new: str
    occurrences: int
    only_last: bool
    reason: str


FIXES = (
    Fix(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        1,
        False,
        "PyTorch 2.13 headers demand C++17",
    ),
    Fix(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        1,
        False,
        "PyTorch 2.13 headers demand C++17",
    ),
    Fix(
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_);",
        "global_ranks_.resize(size_);",
        1,
        False,
        "the stall detector walks this vector; reserve() leaves it empty, so it never reports",
    ),
    Fix(
        "horovod/common/gloo/gloo_context.cc",
        "device_attr.iface = gloo_iface_;",
        "gloo_iface_ = global_context.gloo_iface_;\n  device_attr.iface = gloo_iface_;",
        3,
        True,
        "process-set contexts carry all training traffic but ignored the chosen interface",
    ),
)

BUILD_ENVIRONMENT = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_LOCAL_VERSION": LOCAL_VERSION,
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the vendored Gloo otherwise
    "CXXFLAGS": "-include cstdint -include stdexcept -include string",  # GCC 13 and later
    "LDFLAGS": "-s",  # 1 MB instead of 18 MB
}


def outer_environment() -> dict[str, str]:
    """The environment without the marks by which pip tells a backend apart.

    The inner pip calls build another project; with the marks they would look for its backend here.
    """
    return {k: v for k, v in os.environ.items() if not k.startswith("_PYPROJECT_HOOKS_")}


def fetch_source(folder: Path) -> Path:
    """Download the release into `folder`, check its digest, unpack it; return the source tree."""
    subprocess.check_call(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--no-binary", "horovod", "--dest", str(folder), f"horovod=={RELEASE}"],
        env=outer_environment(),
    )
    archive = next(folder.glob("horovod-*.tar.gz"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise RuntimeError(
            f"horovod {RELEASE}: source archive has SHA-256 {digest}, expected {SDIST_SHA256}; "
            "nothing was built"
        )
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"horovod-{RELEASE}"


def apply_fixes(source: Path) -> None:
    """Apply every fix in place; raise when the source is not the one they were written for."""
    for fix in FIXES:
        path = source / fix.file
        parts = path.read_text().split(fix.old)
        if len(parts) != fix.occurrences + 1:
            raise RuntimeError(
                f"{fix.file}: found {len(parts) - 1} x {fix.old!r}, expected {fix.occurrences}"
            )
        if fix.only_last:
            mended = fix.old.join(parts[:-1]) + fix.new + parts[-1]
        else:
            mended = fix.new.join(parts)
        path.write_text(mended)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the mended wheel into `wheel_directory` (PEP 517); return its file name."""
    environment = {**BUILD_ENVIRONMENT, **outer_environment()}
    environment.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = fetch_source(folder)
        apply_fixes(source)
        subprocess.check_call(
            [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
            + ["--no-cache-dir", "--wheel-dir", str(folder), str(source)],
            env=environment,
        )
        wheel = next(folder.glob("horovod-*.whl"))
        (Path(wheel_directory) / wheel.name).write_bytes(wheel.read_bytes())
        return wheel.name


def build_sdist(sdist_directory: str, config_settings: dict[str, str] | None = None) -> str:
    """Refuse: this folder is installed directly."""
    raise RuntimeError("install this folder directly: pip install ./infra/horovod")
