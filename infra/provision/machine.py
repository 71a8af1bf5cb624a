"""What set-up needs of the machine: looked at first, and all that is missing named at once."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.provision.commands import SetupError

PYTHON = (3, 11)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, and the line by which it names itself."""

    command: str
    version: str


def find_compiler(environment: Mapping[str, str]) -> Compiler | None:
    """The compiler that CXX names, else the first of c++, g++ and clang++ that answers."""
    for command in (environment.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if not words or shutil.which(words[0], path=environment.get("PATH")) is None:
            continue
        asked = subprocess.run(
            [*words, "--version"],
            check=False,
            capture_output=True,
            text=True,
            env=dict(environment),
        )
        if asked.returncode == 0 and asked.stdout:
            return Compiler(command, asked.stdout.splitlines()[0].strip())
    return None


def missing_tools(environment: Mapping[str, str], include: Path) -> list[str]:
    """What this machine lacks to build Horovod and make an environment, each with its cure."""
    path = environment.get("PATH")
    missing = []
    if find_compiler(environment) is None:
        missing.append("a C++ compiler (on Debian and Ubuntu the package g++)")
    if not any(shutil.which(name, path=path) for name in ("cc", "gcc", "clang")):
        missing.append("a C compiler (on Debian and Ubuntu the package gcc)")
    if shutil.which("make", path=path) is None:
        missing.append("make (on Debian and Ubuntu the package make)")
    if not (include / "Python.h").exists():
        missing.append("the headers of Python 3.11 (on Debian and Ubuntu python3.11-dev)")
    if not _has_pip_bundled():
        missing.append("Python's venv module (on Debian and Ubuntu python3.11-venv)")
    return missing


def _has_pip_bundled() -> bool:
    try:
        import ensurepip  # Debian packs it apart from Python

        return bool(ensurepip.version())
    except (ImportError, OSError, LookupError):
        return False


def require_machine(environment: Mapping[str, str]) -> Compiler:
    """The compiler to use.

    Raises:
        SetupError: the lock was not made for this machine, or tools are missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"this is {sys.platform} on {platform.machine()}; the pinned packages were resolved "
            "and tested for Linux on x86_64 only. Nothing was changed"
        )
    missing = missing_tools(environment, Path(sysconfig.get_paths()["include"]))
    compiler = find_compiler(environment)
    if missing or compiler is None:
        raise SetupError(
            f"this machine lacks {'; '.join(missing)}. Install that and run again. "
            "Nothing was changed"
        )
    return compiler


def free_gigabytes(place: Path) -> float:
    """Free space where `place` is, for this user."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize / 1e9
