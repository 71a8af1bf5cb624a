"""One checkout's environment: where it is, what it must be made from, whether it is complete.

Horovod's wheel is built once for a PyTorch, Python, compiler and set of fixes, then kept in the
cache, `wheels/<key>/`: a new checkout, or an environment made again, does not build it again.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from infra.provision.machine import Commands, Compiler, SetupError, Step, cache_folder


class Checkout:
    """Folders and files of one checkout, or of an installation from a wheel.

    Args:
        root: folder of the package `infra`: the checkout, or that of an installation.
        venv: the environment; None: the checkout's own, `.venv`.
        python: its interpreter; None: the one in its folder `bin`.

    Attributes:
        venv: the virtual environment, and `python` its interpreter.
        state: set-up's own folder in it (lock, stamp, logs); also marks it as made by set-up.
        stamp: written last: what the environment was made from and what it holds.
        requirements: the lock: every package, one version each, with digests.
        weights: packages of which only the files are read, beside the environment's own.
        weights_requirements: the lock of these.
        horovod: the build of Horovod; `backend` is its program.
    """

    def __init__(self, root: Path, venv: Path | None = None, python: Path | None = None) -> None:
        self.root = root
        self.venv = venv or root / ".venv"
        self.python = python or self.venv / "bin" / "python"
        self.state = self.venv / "falaj-setup"
        self.stamp = self.state / "stamp.json"
        self.requirements = root / "infra" / "requirements.lock"
        self.weights = self.venv / "weights"
        self.weights_requirements = root / "infra" / "weights" / "requirements.lock"
        self.horovod = root / "infra" / "horovod"
        self.backend = self.horovod / "horovod_backend.py"

    def horovod_sources(self) -> list[str]:
        """What decides how Horovod's wheel comes out."""
        files = [self.backend, self.horovod / "fixes.toml"]
        return [file.read_text(encoding="utf-8") for file in files]

    def wanted_digest(self) -> str:
        """What an environment must have been made from to be complete for this checkout.

        Its path counts: the scripts of an environment name their interpreter by absolute path.
        Tools' settings in pyproject.toml do not.
        """
        import tomllib  # new in 3.11: an older Python must get as far as the message about it

        code = sorted((self.root / "infra" / "provision").glob("*.py"))
        files = [self.requirements, self.weights_requirements, self.root / "infra" / "setup.py"]
        texts = [path.read_text(encoding="utf-8") for path in [*files, *code]]
        tables = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        setuptools = tables.get("tool", {}).get("setuptools")
        project = json.dumps([tables.get("build-system"), tables.get("project"), setuptools])
        place = [str(self.root), platform.machine()]
        return digest([*texts, *self.horovod_sources(), project, *place])

    def installed(self) -> list[str]:
        """Names and versions of what is installed, as the names of the metadata folders."""
        folders = ("lib/python3*/site-packages", "weights")
        return sorted({p.name for f in folders for p in self.venv.glob(f"{f}/*.dist-info")})

    def is_current(self, wanted: str) -> bool:
        """Whether the environment was finished from the wanted parts and still holds them.

        A package added by hand is no reason to make it again; one removed or changed is.
        """
        try:
            stamp = json.loads(self.stamp.read_text(encoding="utf-8"))
            if stamp["digest"] != wanted or not set(stamp["distributions"]) <= {*self.installed()}:
                return False
            line = [str(self.python), "-I", "-S", "-c", ""]
            return subprocess.run(line, check=False, capture_output=True).returncode == 0
        except (OSError, ValueError, KeyError, TypeError):
            return False  # no stamp, or one that set-up did not write

    def mark_complete(self, wanted: str) -> None:
        """Declare the environment complete."""
        stamp = {"digest": wanted, "distributions": self.installed()}
        write_aside(self.stamp, json.dumps(stamp, indent=1))

    def claim(self) -> None:
        """Make the environment's folder ours.

        Raises:
            SetupError: there is one that set-up did not make; it is left alone.
        """
        foreign = self.venv.exists() and not self.state.exists() and any(self.venv.iterdir())
        if self.venv.is_symlink() or foreign:
            raise SetupError(
                f"{self.venv} was not made by set-up, so it is left alone. Move it away or delete "
                "it, and run again"
            )
        self.state.mkdir(parents=True, exist_ok=True)

    def withdraw(self) -> list[Path]:
        """Take back the stamp; return what else the environment holds but set-up's own folder."""
        self.stamp.unlink(missing_ok=True)
        return [path for path in self.venv.iterdir() if path != self.state]


def digest(parts: Sequence[str]) -> str:
    """SHA-256 of a list of texts; ["ab", "c"] and ["a", "bc"] differ."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def write_aside(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def read_lock(text: str) -> dict[str, str]:
    """The lock's entries, `name==version` and digests, by package name; comments are left out."""
    entries: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line and line[0] not in " #":
            name = line.partition("==")[0]
            entries[name] = line
        elif line.strip().startswith("--hash="):
            entries[name] += "\n" + line
    return entries


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """Hold a file lock and give its descriptor; `waiting` is called where another one holds it.

    The system drops the lock when the last process that holds the descriptor ends, however it ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def wheel_key(
    checkout: Checkout, torch: str, compiler: Compiler, options: Mapping[str, str] | None = None
) -> str:
    """Name of the wheel's folder in the cache: all that decides how the wheel comes out.

    Args:
        checkout: has the fixes.
        torch: PyTorch's version.
        compiler: what builds it.
        options: variables of the build, such as `HOROVOD_GPU_OPERATIONS`.
    """
    place = [str(sysconfig.get_config_var("SOABI")), platform.machine(), compiler.version]
    chosen = [f"{name}={value}" for name, value in sorted((options or {}).items())]
    return digest([torch, *place, *chosen, *checkout.horovod_sources()])[:16]


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
