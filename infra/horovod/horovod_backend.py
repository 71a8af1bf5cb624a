"""PEP 517 backend: fetch the pinned Horovod source, mend it, build a wheel for the installed torch.

Horovod 0.28.1 is the newest release and does not compile against PyTorch 2.13 as published. Of the
fixes below two make it compile, two make it independent of where it is built, four mend three
defects that hurt a job on Gloo, and the others let its threads sleep until there is something to do
(see each one's reason). Every fix is an exact replacement
that must match an exact number of times, so a different source cannot be mended by accident.

Set-up calls this file with a folder, inside the environment whose PyTorch the wheel is for; `pip
install ./infra/horovod` works as well.

The wheel is for CPUs (Gloo). With HOROVOD_GPU_OPERATIONS=NCCL in the environment it is for GPUs
too: that needs a PyTorch built for CUDA and a CUDA toolkit (nvcc; HOROVOD_CUDA_HOME or CUDA_HOME)
of the same major version, but no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
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


WAKING = (
    "the ranks' background threads met once a cycle whether there was anything to exchange or not: "
    "a short cycle costs a core that trains, a long one makes each exchange wait. With "
    "HOROVOD_WAKE_ON_ENQUEUE they meet when there is something, and else once in a long cycle"
)
WAITING = (
    "whoever waited for an exchange kept the core busy on which the exchange was to be computed"
)

FIXES = (
    Fix(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "PyTorch 2.13 headers demand C++17",
    ),
    Fix(
        "CMakeLists.txt",
        "project(horovod CXX)",
        "project(horovod CXX)\nset(CMAKE_SKIP_RPATH ON)",
        "the wheel outlives the environment that built it, so it must not look there for PyTorch's "
        "libraries; PyTorch is imported first and has them loaded",
    ),
    Fix(
        "CMakeLists.txt",
        "--version-script=${CMAKE_SOURCE_DIR}/horovod.lds",
        r"--version-script=\"${CMAKE_SOURCE_DIR}/horovod.lds\"",
        "a folder whose name has a space would end the linker's argument",
    ),
    Fix(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "PyTorch 2.13 headers demand C++17",
    ),
    Fix(
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_);",
        "global_ranks_.resize(size_);",
        "the stall detector walks this vector; reserve() leaves it empty, so it never reports",
    ),
    Fix(
        "horovod/common/gloo/gloo_context.cc",
        "device_attr.iface = gloo_iface_;",
        "gloo_iface_ = global_context.gloo_iface_;\n  device_attr.iface = gloo_iface_;",
        "process-set contexts carry all training traffic but ignored the chosen interface",
        occurrences=3,
        only_last=True,
    ),
    Fix(
        "horovod/common/operations.cc",
        """    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
""",
        """    try {
      global_gloo_context.Initialize(ParseGlooIface());
      if (state.control_operation == LibType::GLOO) {
        state.process_set_table.Initialize(global_gloo_context);
      }
    } catch (const std::exception& ex) {
      LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
      state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);
      global_gloo_context.Finalize();
      state.initialization_failed = true;
      return;
    }
  }
""",
        "a rank that is lost while the others connect would abort them all, with what they hold in "
        "memory",
    ),
    Fix(
        "horovod/common/operations.cc",
        """    // Reset initialization flag
    horovod_global.initialization_done = false;
""",
        """    // Reset initialization flag
    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
""",
        "after a start that failed the next one would fail too",
    ),
    Fix(
        "horovod/common/tensor_queue.h",
        """class TensorQueue {
public:
""",
        """// Wakes the background thread; see RunLoopOnce.
class CycleBell {
public:
  void Ring() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      rung_ = true;
    }
    changed_.notify_one();
  }

  template <class Duration> void WaitFor(Duration limit) {
    std::unique_lock<std::mutex> guard(mutex_);
    changed_.wait_for(guard, limit, [this] { return rung_; });
    rung_ = false;
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool rung_ = false;
};

inline CycleBell cycle_bell;

class TensorQueue {
public:
  bool HasTensors() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return !tensor_table_.empty();
  }

""",
        WAKING,
    ),
    Fix(
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n",
        "#include <condition_variable>\n#include <iostream>\n",
        WAKING,
    ),
    Fix(
        "horovod/common/tensor_queue.cc",
        """  message_queue_.push(std::move(message));
  return Status::OK();
""",
        """  message_queue_.push(std::move(message));
  cycle_bell.Ring();
  return Status::OK();
""",
        WAKING,
    ),
    Fix(
        "horovod/common/tensor_queue.cc",
        """    message_queue_.push(std::move(messages[i]));
  }
  return Status::OK();
""",
        """    message_queue_.push(std::move(messages[i]));
  }
  cycle_bell.Ring();
  return Status::OK();
""",
        WAKING,
    ),
    Fix(
        "horovod/common/operations.cc",
        """    std::this_thread::sleep_for(sleep_duration);
  }
  state.last_cycle_start""",
        """    static const bool wakes = std::getenv("HOROVOD_WAKE_ON_ENQUEUE") != nullptr;
    if (wakes) {
      // What is there already waits for another rank: meet that one as soon as it comes.
      std::chrono::steady_clock::duration limit = std::chrono::microseconds(200);
      bool waiting = false;
      for (auto id : state.process_set_table.Ids()) {
        waiting |= state.process_set_table.Get(id).tensor_queue.HasTensors();
      }
      cycle_bell.WaitFor(waiting ? std::min(limit, sleep_duration) : sleep_duration);
    } else {
      std::this_thread::sleep_for(sleep_duration);
    }
  }
  state.last_cycle_start""",
        WAKING,
    ),
    Fix(
        "horovod/torch/handle_manager.h",
        "  bool PollHandle(int handle);\n",
        "  bool PollHandle(int handle);\n"
        "  bool AwaitHandle(int handle, std::chrono::milliseconds limit);\n",
        WAITING,
    ),
    Fix(
        "horovod/torch/handle_manager.h",
        "  std::mutex mutex_;\n",
        "  std::mutex mutex_;\n  std::condition_variable done_;\n",
        WAITING,
    ),
    Fix(
        "horovod/torch/handle_manager.h",
        "#include <atomic>\n",
        "#include <atomic>\n#include <chrono>\n#include <condition_variable>\n",
        WAITING,
    ),
    Fix(
        "horovod/torch/handle_manager.cc",
        """  results_[handle] = std::make_shared<Status>(status);
}
""",
        """  results_[handle] = std::make_shared<Status>(status);
  done_.notify_all();
}

bool HandleManager::AwaitHandle(int handle, std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> guard(mutex_);
  return done_.wait_for(guard, limit, [&] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
}
""",
        WAITING,
    ),
    Fix(
        "horovod/torch/mpi_ops_v2.cc",
        """    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
  auto status""",
        """    {
      py::gil_scoped_release release_python_gil;
      handle_manager.AwaitHandle(handle, std::chrono::milliseconds(100));
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  auto status""",
        WAITING,
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


@dataclass(frozen=True)
class Cuda:
    """What is installed of CUDA; None for what is not there."""

    pytorch: str
    pytorch_cuda: str | None
    toolkit: Path
    toolkit_version: str | None
    nccl: Path | None
    """The folder, in PyTorch's environment, that holds NCCL's `include` and `lib`."""


def installed_cuda(outer: dict[str, str]) -> Cuda:
    """Look at the PyTorch of this environment, at its NCCL, and at the toolkit."""
    import torch  # the build environment has it; without GPUs nothing of this is asked

    toolkit = Path(outer.get("HOROVOD_CUDA_HOME") or outer.get("CUDA_HOME") or "/usr/local/cuda")
    nccl = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    places = list(nccl.submodule_search_locations or []) if nccl else []
    return Cuda(
        pytorch=torch.__version__,
        pytorch_cuda=torch.version.cuda,
        toolkit=toolkit,
        toolkit_version=_toolkit_version(toolkit / "bin" / "nvcc"),
        nccl=Path(places[0]) if places else None,
    )


def _toolkit_version(nvcc: Path) -> str | None:
    if not nvcc.is_file():
        return None
    said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"release (\d+\.\d+)", said.stdout)
    return found[1] if found else None


def gpu_environment(cuda: Cuda, folder: Path) -> dict[str, str]:
    """What a build for GPUs needs besides: one NCCL in the process, the one that PyTorch brings.

    Args:
        cuda: what is installed.
        folder: where a link is made by which the linker finds that NCCL; it must outlive the build.

    Raises:
        RuntimeError: PyTorch, toolkit and NCCL do not fit.
    """
    if cuda.pytorch_cuda is None:
        raise RuntimeError(
            f"HOROVOD_GPU_OPERATIONS=NCCL needs a PyTorch built for CUDA, but {cuda.pytorch} is "
            "installed. Install one, or leave HOROVOD_GPU_OPERATIONS out"
        )
    if cuda.toolkit_version is None:
        raise RuntimeError(
            f"{cuda.toolkit} holds no CUDA toolkit (bin/nvcc), and PyTorch {cuda.pytorch} needs "
            f"one of CUDA {cuda.pytorch_cuda}. Install it, or name its folder: HOROVOD_CUDA_HOME"
        )
    if cuda.toolkit_version.split(".")[0] != cuda.pytorch_cuda.split(".")[0]:
        raise RuntimeError(
            f"{cuda.toolkit} is CUDA {cuda.toolkit_version}, but PyTorch {cuda.pytorch} is built "
            f"for CUDA {cuda.pytorch_cuda}; the major versions must be the same. Name another "
            "toolkit's folder: HOROVOD_CUDA_HOME"
        )
    if cuda.nccl is None or not (cuda.nccl / "lib" / NCCL_LIBRARY).exists():
        raise RuntimeError(
            f"PyTorch {cuda.pytorch} has brought no NCCL ({NCCL_LIBRARY} of nvidia-nccl) into "
            "this environment; install PyTorch from its CUDA wheels"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # The package holds the library by its full name only, under which no linker looks.
    (folder / "libnccl.so").symlink_to(cuda.nccl / "lib" / NCCL_LIBRARY)
    version = tuple(map(int, cuda.toolkit_version.split(".")))
    new = version >= FIRST_WITH_BLACKWELL
    return {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(cuda.toolkit),
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_NCCL_INCLUDE": str(cuda.nccl / "include"),
        "HOROVOD_NCCL_LIB": str(folder),
        "HOROVOD_BUILD_CUDA_CC_LIST": COMPUTE_CAPABILITIES if new else OLD_TOOLKIT_CAPABILITIES,
    }


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
    return build_environment({**gpu_environment(installed_cuda(outer), folder), **outer})


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
    for fix in FIXES:
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
