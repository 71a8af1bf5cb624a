"""What a run ran on: the code's commit, the machine, the versions of the named packages."""

import os
import platform
import subprocess
from importlib.metadata import version

from tasks.kernel.extras import is_installed
from tasks.kernel.settings import PROJECT_ROOT

NAMED_PACKAGES = (
    "prefect torch horovod feast great-expectations onnx onnxruntime openvino nncf mlflow pandas "
    "duckdb"
).split()


def code_commit() -> str:
    """Commit of the code that runs, `-modified` where files differ from it.

    An image without a repository says it in `FALAJ_CODE_COMMIT`; an installed wheel has its
    release, such as `v0.1.0` (a repository around the environment is somebody else's).
    """
    if told := os.environ.get("FALAJ_CODE_COMMIT"):
        return told
    if not (PROJECT_ROOT / ".git").exists():
        return f"v{version('falaj')}"
    git = ["git", "-C", str(PROJECT_ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        if commit.returncode:
            return "unknown"
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return commit.stdout.strip() + ("-modified" if changed.stdout.strip() else "")


def host_facts() -> dict[str, str]:
    """CPU, cores, memory, and the version of each named package that is installed."""
    with open("/proc/cpuinfo") as cpuinfo:
        names = [line.split(":", 1)[1].strip() for line in cpuinfo if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.1f} GiB",
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in NAMED_PACKAGES if is_installed(name)},
    }
