"""Horovod's wheel: built once for a PyTorch, Python, compiler and set of fixes, then kept.

It is kept in the cache, `wheels/<key>/`, so that a new checkout, or an environment made again, does
not build it again.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from infra.provision.checkout import Checkout, digest, exclusive
from infra.provision.commands import Commands, Step
from infra.provision.machine import Compiler, cache_folder


def wheel_key(checkout: Checkout, torch: str, compiler: Compiler) -> str:
    """Name of the wheel's folder in the cache: all that decides how the wheel comes out."""
    place = [str(sysconfig.get_config_var("SOABI")), platform.machine(), compiler.version]
    return digest([torch, *place, *checkout.horovod_sources()])[:16]


def kept_wheel(folder: Path) -> Path | None:
    """The wheel kept in a folder of the cache, if it is there and every file in it is intact."""
    for wheel in folder.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                if archive.testzip() is None:
                    return wheel
        except (zipfile.BadZipFile, EOFError):
            continue
    return None


def horovod_wheel(
    checkout: Checkout, commands: Commands, key: str, compiler: Compiler, step: Step
) -> Path:
    """The wheel of this key: from the cache, or built into it."""
    folder = cache_folder() / "wheels" / key
    folder.mkdir(parents=True, exist_ok=True)

    def waiting() -> None:
        print("another set-up is building it", end=" ... ", flush=True)

    with exclusive(folder / "lock", waiting) as lock:
        wheel = kept_wheel(folder)
        if wheel is not None:
            step.outcome = "built before, taken from the cache"
            return wheel
        step.outcome = "built"
        for stale in folder.glob("build-*"):  # of a build that was killed; the lock is ours
            shutil.rmtree(stale)
        scratch = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
        try:
            environment = {**commands.environment, "CXX": compiler.command, "TMPDIR": str(scratch)}
            locks = (*commands.held_locks, lock)
            builder = replace(commands, environment=environment, held_locks=locks)
            builder.run("building Horovod", [checkout.python, checkout.backend, scratch])
            built = next(scratch.glob("*.whl"))
            with built.open("rb") as stream:
                os.fsync(stream.fileno())
            return built.rename(folder / built.name)
        finally:
            shutil.rmtree(scratch)
