"""PEP 517 backend: fetch the pinned Horovod source, fix it, build a wheel for the installed torch.

Horovod 0.28.1 is the newest release and does not compile against PyTorch 2.13 as published. Of the
fixes in `fixes.toml` two make it compile, two make it independent of where it is built, four cure
three defects that hurt a job on Gloo, and the others let its threads sleep until there is something
to do. Every fix is an exact replacement that must match an exact number of times.

Set-up calls this file with a folder, inside the environment whose PyTorch the wheel is for; `pip
install ./infra/horovod` works as well.

The wheel is for CPUs (Gloo). With HOROVOD_GPU_OPERATIONS=NCCL in the environment it is for GPUs
too: that needs a PyTorch built for CUDA and a CUDA toolkit (nvcc; HOROVOD_CUDA_HOME or CUDA_HOME)
of the same major version, but no GPU.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

RELEASE = "0.28.1"
LOCAL_VERSION = "falaj3"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Fix:
    """One exact replacement in the source; `only_last` spares the earlier occurrences."""

    file: str
    old: str
    new: str
    reason: str
    occurrences: int = 1
    only_last: bool = False


def fixes() -> tuple[Fix, ...]:
    """All of `fixes.toml`, in order."""
    text = Path(__file__).with_name("fixes.toml").read_text(encoding="utf-8")
    return tuple(Fix(**described) for described in tomllib.loads(text)["fix"])


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
# Ampere, Hopper, Blackwell. Horovod's own list has generations that new toolkits no longer know.
COMPUTE_CAPABILITIES = "80,90,100"
OLD_TOOLKIT_CAPABILITIES = "80,90"  # CUDA 12.8 was the first to know Blackwell
FIRST_WITH_BLACKWELL = (12, 8)
NCCL_LIBRARY = "libnccl.so.2"
COMPILER_BYTES = 2_300_000_000  # the largest compiler process of this build: 2.1 GB


def outer_environment() -> dict[str, str]:
    """The caller's environment without what belongs to the caller's own tools.

    The inner pip calls build another project: with pip's marks they would look for its backend
    here. And a `make` around this one would hand its number of jobs, usually one, to the build.
    """
    prefixes = ("_PYPROJECT_HOOKS_", "MAKE")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k != "MFLAGS"}


def build_environment(outer: dict[str, str]) -> dict[str, str]:
    """A build for CPUs: flags of the caller are added to the needed ones, other settings win."""
    merged = {**BUILD_ENVIRONMENT, **outer}
    for name in ("CXXFLAGS", "LDFLAGS"):
        merged[name] = f"{BUILD_ENVIRONMENT[name]} {outer.get(name, '')}".strip()
    return merged | {"MAKEFLAGS": f"-j{num_jobs()}"}


def gpu_environment(outer: dict[str, str], folder: Path) -> dict[str, str]:
    """What a build for GPUs needs besides: one NCCL in the process, the one that PyTorch brings.

    Args:
        outer: the caller's environment; may name the toolkit.
        folder: where a link is made by which the linker finds that NCCL; it must outlive the build.

    Raises:
        RuntimeError: PyTorch, toolkit and NCCL do not fit.
    """
    import torch  # the build environment has it; without GPUs nothing of this is asked

    usual = Path("/usr/local/cuda") / "bin" / "nvcc"
    on_path = shutil.which("nvcc", path=outer.get("PATH")) or usual
    named = outer.get("HOROVOD_CUDA_HOME") or outer.get("CUDA_HOME")
    toolkit = Path(named) if named else Path(on_path).resolve().parents[1]
    version, wanted, nccl = toolkit_version(toolkit / "bin" / "nvcc"), torch.version.cuda, None
    if importlib.util.find_spec("nvidia") and (spec := importlib.util.find_spec("nvidia.nccl")):
        nccl = next(map(Path, spec.submodule_search_locations or ()), None)
    has_nccl = nccl is not None and (nccl / "lib" / NCCL_LIBRARY).exists()
    same = wanted and version and wanted.split(".")[0] == version.split(".")[0]
    if not same or not has_nccl:
        raise RuntimeError(
            "HOROVOD_GPU_OPERATIONS=NCCL needs a PyTorch built for CUDA, the NCCL that its wheels "
            "bring, and a CUDA toolkit of the same major version; found PyTorch "
            f"{torch.__version__} for CUDA {wanted}, NCCL {nccl}, CUDA {version} in {toolkit}. "
            "Name another toolkit's folder: HOROVOD_CUDA_HOME"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # The package holds the library by its full name only, under which no linker looks.
    (folder / "libnccl.so").symlink_to(nccl / "lib" / NCCL_LIBRARY)
    new = tuple(map(int, version.split("."))) >= FIRST_WITH_BLACKWELL
    return {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(toolkit),
        "CUDA_HOME": str(toolkit),  # where PyTorch looks for what its extensions are linked with
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_NCCL_INCLUDE": str(nccl / "include"),
        "HOROVOD_NCCL_LIB": str(folder),
        "HOROVOD_BUILD_CUDA_CC_LIST": COMPUTE_CAPABILITIES if new else OLD_TOOLKIT_CAPABILITIES,
    }


def toolkit_version(nvcc: Path) -> str | None:
    """The version of a CUDA toolkit by its compiler; None where there is none."""
    if not nvcc.is_file():
        return None
    told = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"release (\d+\.\d+)", told.stdout)
    return found[1] if found else None


def whole_environment(outer: dict[str, str], folder: Path) -> dict[str, str]:
    """What the build sees, for CPUs or, where `outer` asks for NCCL, for GPUs too.

    Raises:
        RuntimeError: NCCL is asked for and what is installed does not fit, or something else is.
    """
    operations = outer.get("HOROVOD_GPU_OPERATIONS")
    if operations is None:
        return build_environment(outer)
    if operations != "NCCL":
        raise RuntimeError(
            f"HOROVOD_GPU_OPERATIONS={operations} is not supported; NCCL is, or leave it out"
        )
    found = gpu_environment(outer, folder)
    return build_environment({**found, **outer, "CUDA_HOME": found["CUDA_HOME"]})


def num_jobs() -> int:
    """Compilers at a time: one a core, as long as each has the memory that it needs."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available_bytes = int(memory["MemAvailable"].split()[0]) * 1024
    return max(1, min(len(os.sched_getaffinity(0)), available_bytes // COMPILER_BYTES))


def run_pip(*arguments: str, environment: dict[str, str]) -> None:
    """Run this environment's pip; build isolation is off, so nothing unpinned takes part."""
    subprocess.check_call(
        [sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-build-isolation"],
        env=environment,
    )


def fetch_source(folder: Path) -> Path:
    """Download the release into `folder` and unpack it; return the source tree.

    pip checks the digest before anything of the archive is unpacked or run.
    """
    pinned = folder / "horovod.txt"
    pinned.write_text(f"horovod=={RELEASE} --hash=sha256:{SDIST_SHA256}\n")
    run_pip(
        *("download", "--require-hashes", "--no-binary", "horovod"),
        *("--dest", str(folder), "--requirement", str(pinned)),
        environment=outer_environment(),
    )
    with tarfile.open(next(folder.glob("horovod-*.tar.gz"))) as archive:
        archive.extractall(folder)
    return folder / f"horovod-{RELEASE}"


def apply_fixes(source: Path) -> None:
    """Apply every fix in place; raise when the source is not the one they were written for."""
    for fix in fixes():
        path = source / fix.file
        parts = path.read_text().split(fix.old)
        if len(parts) != fix.occurrences + 1:
            raise RuntimeError(
                f"{fix.file}: found {len(parts) - 1} x {fix.old!r}, expected {fix.occurrences}; "
                "this is not the source that the fixes were written for"
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
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environment = whole_environment(outer_environment(), folder / "nccl")
        source = fetch_source(folder)
        apply_fixes(source)
        run_pip(
            *("wheel", "--verbose", "--no-cache-dir", "--wheel-dir", str(folder), str(source)),
            environment=environment,
        )
        wheel = next(folder.glob("horovod-*.whl"))
        (Path(wheel_directory) / wheel.name).write_bytes(wheel.read_bytes())
        return wheel.name


def build_sdist(sdist_directory: str, config_settings: dict[str, str] | None = None) -> str:
    """Refuse: this folder is installed directly."""
    raise RuntimeError("install this folder directly: pip install ./infra/horovod")


if __name__ == "__main__":
    try:
        print(build_wheel(sys.argv[1]))
    except (RuntimeError, subprocess.CalledProcessError) as exc:
        sys.exit(f"no wheel was built: {exc}")
