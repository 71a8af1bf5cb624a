"""Horovod's wheel: built once for a PyTorch, Python, compiler and set of fixes, then kept.

It is kept in the cache, `wheels/<key>/`, beside a file with its ingredients, so that a new checkout
or an environment made again, does not build it again.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sysconfig
import tempfile
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from infra.provision.checkout import Checkout, digest, exclusive, write_aside
from infra.provision.commands import Commands, Step
from infra.provision.machine import Compiler, cache_folder


@dataclass(frozen=True)
class WheelParts:
    """All that decides how the wheel comes out."""

    torch: str
    python_abi: str
    machine: str
    compiler: str
    backend: str

    @property
    def key(self) -> str:
        """Name of the wheel's folder in the cache."""
        return digest(list(asdict(self).values()))[:16]


def wheel_parts(torch: str, compiler: Compiler, backend_source: str) -> WheelParts:
    """The parts for this machine; the backend counts by the digest of its source."""
    return WheelParts(
        torch=torch,
        python_abi=str(sysconfig.get_config_var("SOABI")),
        machine=platform.machine(),
        compiler=compiler.version,
        backend=digest([backend_source]),
    )


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
    checkout: Checkout, commands: Commands, parts: WheelParts, compiler: Compiler, step: Step
) -> Path:
    """The wheel for these parts: from the cache, or built into it."""
    folder = cache_folder(os.environ, checkout.root) / "wheels" / parts.key
    folder.mkdir(parents=True, exist_ok=True)

    def waiting() -> None:
        step.tick("another set-up is building it; waiting")

    with exclusive(folder / "lock", waiting) as lock:
        wheel = kept_wheel(folder)
        if wheel is not None:
            step.outcome = "built before, taken from the cache"
            return wheel
        step.outcome = "built"
        commands = replace(commands, held_locks=(*commands.held_locks, lock))
        wheel = _build(checkout, commands, compiler, folder, step)
        write_aside(folder / "made-from.json", json.dumps(asdict(parts), indent=1))
        return wheel


def _build(
    checkout: Checkout, commands: Commands, compiler: Compiler, folder: Path, step: Step
) -> Path:
    for stale in folder.glob("build-*"):  # of a build that was killed; the lock is ours
        shutil.rmtree(stale)
    scratch = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    try:
        environment = {**commands.environment, "CXX": compiler.command, "TMPDIR": str(scratch)}
        build = [checkout.python, checkout.horovod_backend, scratch]
        replace(commands, environment=environment).run("building Horovod", build, step)
        built = next(scratch.glob("*.whl"))
        with built.open("rb") as stream:
            os.fsync(stream.fileno())
        return built.rename(folder / built.name)
    finally:
        shutil.rmtree(scratch)
