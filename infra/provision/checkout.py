"""One checkout's environment: where it is, what it must be made from, whether it is complete."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.provision.commands import SetupError


class Checkout:
    """Folders and files of one checkout.

    Attributes:
        venv: the virtual environment, and `python` its interpreter.
        state: set-up's own folder in it (lock, stamp, logs); also marks it as made by set-up.
        stamp: written last: what the environment was made from and what it holds.
        requirements: the lock: every package, one version each, with digests.
        weights: packages of which only the files are read, beside the environment's own.
        weights_requirements: the lock of these.
        horovod_backend: the build of Horovod.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.state = self.venv / "falaj-setup"
        self.stamp = self.state / "stamp.json"
        self.requirements = root / "infra" / "requirements.lock"
        self.weights = self.venv / "weights"
        self.weights_requirements = root / "infra" / "weights" / "requirements.lock"
        self.horovod_backend = root / "infra" / "horovod" / "horovod_backend.py"

    def sources(self) -> list[Path]:
        """The files that decide how an environment comes out."""
        code = sorted((self.root / "infra" / "provision").glob("*.py"))
        entry = self.root / "infra" / "setup.py"
        locks = [self.requirements, self.weights_requirements]
        return [*locks, entry, *code, self.horovod_backend]


def digest(parts: Sequence[str]) -> str:
    """SHA-256 of a list of texts; ["ab", "c"] and ["a", "bc"] differ."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def project_metadata(pyproject: str) -> str:
    """The tables of pyproject.toml that an installation depends on; tools' settings are not."""
    import tomllib  # new in 3.11: an older Python must get as far as the message about it

    tables = tomllib.loads(pyproject)
    setuptools = tables.get("tool", {}).get("setuptools")
    return json.dumps([tables.get("build-system"), tables.get("project"), setuptools])


def wanted_digest(checkout: Checkout) -> str:
    """What an environment must have been made from to be complete for this checkout.

    Its path counts: the scripts of an environment name their interpreter by absolute path.
    """
    texts = [path.read_text(encoding="utf-8") for path in checkout.sources()]
    pyproject = (checkout.root / "pyproject.toml").read_text(encoding="utf-8")
    return digest([*texts, project_metadata(pyproject), str(checkout.root), platform.machine()])


def installed_distributions(venv: Path) -> set[str]:
    """Names and versions of what is installed, as the names of the metadata folders."""
    folders = ("lib/python3*/site-packages", "weights")
    return {path.name for folder in folders for path in venv.glob(f"{folder}/*.dist-info")}


def is_current(checkout: Checkout, wanted: str) -> bool:
    """Whether the environment was finished from the wanted parts and still holds them.

    A package added by hand is no reason to make it again; one removed or changed is.
    """
    try:
        stamp = json.loads(checkout.stamp.read_text(encoding="utf-8"))
        if stamp["digest"] != wanted:
            return False
        if not set(stamp["distributions"]) <= installed_distributions(checkout.venv):
            return False
        start = subprocess.run(
            [checkout.python, "-I", "-S", "-c", ""], check=False, capture_output=True
        )
        return start.returncode == 0
    except (OSError, ValueError, KeyError, TypeError):
        return False  # no stamp, or one that set-up did not write


def mark_complete(checkout: Checkout, wanted: str) -> None:
    """Declare the environment complete."""
    stamp = {"digest": wanted, "distributions": sorted(installed_distributions(checkout.venv))}
    write_aside(checkout.stamp, json.dumps(stamp, indent=1))


def claim(checkout: Checkout) -> None:
    """Make the environment's folder ours.

    Raises:
        SetupError: there is one that set-up did not make; it is left alone.
    """
    venv = checkout.venv
    foreign = venv.exists() and not checkout.state.exists() and any(venv.iterdir())
    if venv.is_symlink() or foreign:
        raise SetupError(
            f"{venv} was not made by set-up, so it is left alone. Move it away or delete it, "
            "and run again"
        )
    checkout.state.mkdir(parents=True, exist_ok=True)


def withdraw(checkout: Checkout) -> list[Path]:
    """Take back the stamp; return what else the environment holds, set-up's own folder excepted."""
    checkout.stamp.unlink(missing_ok=True)
    return [path for path in checkout.venv.iterdir() if path != checkout.state]


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
    """Hold a file lock and give its descriptor; `waiting` is called while another one holds it.

    The system drops the lock when the last process that holds the descriptor ends, however it ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _try_lock(descriptor):
            waiting()
            time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
