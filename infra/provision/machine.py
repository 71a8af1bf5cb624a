"""What set-up takes from its caller: the machine's tools, package sources, an environment.

And the long commands that it runs there: each with a log, shown as a numbered line with its
seconds.

pip's configuration (files and variables) decides where packages come from, for uv as well; nothing
else that is configured for pip or uv may change what gets installed.
"""

import ast
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PYTHON = (3, 11)
LINE_LENGTH = 300  # a compiler's command line has thousands of characters

# pip's settings that say where packages come from, and the variables that tell uv the same.
UV_VARIABLES: dict[str, tuple[str, ...]] = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "no-index": ("UV_NO_INDEX",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "proxy": ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
    "find-links": (),  # see link_locations
}
DROPPED_PREFIXES = ("PIP_", "UV_", "PYTHON", "HOROVOD_", "CMAKE_", "MAKE", "_PYPROJECT_HOOKS_")
DROPPED = {
    *("VIRTUAL_ENV", "CONDA_PREFIX", "__PYVENV_LAUNCHER__", "MFLAGS", "GNUMAKEFLAGS", "DESTDIR"),
    *("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "ARCHFLAGS"),
}
KEPT = {"UV_CACHE_DIR"}


class SetupError(Exception):
    """Set-up cannot continue; the message has what was seen and what to do."""


@dataclass
class Step:
    """What becomes of one step."""

    outcome: str = "done"


@dataclass
class Progress:
    """Numbers the steps, one line each."""

    total: int
    number: int = 0

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show one step; it ends as `stopped` when its body raises."""
        self.number += 1
        print(f"[{self.number}/{self.total}] {title}", end=" ... ", flush=True)
        step, started = Step(), time.monotonic()
        try:
            yield step
        except BaseException:
            step.outcome = "stopped"
            raise
        finally:
            print(f"{step.outcome} ({time.monotonic() - started:.1f} s)", flush=True)


@dataclass(frozen=True)
class Commands:
    """Runs commands with one environment; each one's output goes to a log of its own.

    They inherit set-up's locks: should set-up be killed, the next one waits for what still runs.
    """

    logs: Path
    environment: Mapping[str, str]
    cwd: Path
    held_locks: tuple[int, ...]

    def run(self, what: str, command: Sequence[str | Path]) -> str:
        """Run one command to its end and return its output.

        Raises:
            SetupError: it failed; the message has the log's path and its last lines.
        """
        log = self.logs / f"{what.replace(' ', '-')}.log"
        try:
            with log.open("wb") as output:
                done = subprocess.run(
                    command,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(self.environment),
                    cwd=self.cwd,
                    pass_fds=self.held_locks,
                )
        except OSError as exc:
            raise SetupError(f"{what} failed: {command[0]}: {exc.strerror}") from exc
        text = log.read_text(encoding="utf-8", errors="replace")
        if done.returncode:
            lines = [line[:LINE_LENGTH] for line in text.splitlines() if line.strip()]
            raise SetupError(
                f"{what} failed with exit code {done.returncode}; what was downloaded is kept. The "
                f"end of {log}:\n" + "\n".join(lines[-20:])
            )
        return text


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, and the line by which it names itself."""

    command: str
    version: str


def find_compiler(environment: Mapping[str, str]) -> Compiler | None:
    """The compiler that CXX names, else the first of c++, g++ and clang++ that answers."""
    for command in (environment.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0], path=environment.get("PATH")):
            line = [*words, "--version"]
            asked = subprocess.run(
                line, check=False, capture_output=True, text=True, env=dict(environment)
            )
            if asked.returncode == 0 and asked.stdout:
                return Compiler(command, asked.stdout.splitlines()[0].strip())
    return None


def require_machine(environment: Mapping[str, str], *, makes_environment: bool = True) -> Compiler:
    """The compiler to use.

    Args:
        environment: variables; `PATH` and `CXX` count.
        makes_environment: False: packages are installed into the one that runs this.

    Raises:
        SetupError: the lock was not made for this machine, or tools are missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"this is {sys.platform} on {platform.machine()}; the pinned packages were resolved "
            "and tested for Linux on x86_64 only. Nothing was changed"
        )
    compiler, path = find_compiler(environment), environment.get("PATH")
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    there: dict[str, object] = {
        "g++": compiler,
        "gcc": any(shutil.which(name, path=path) for name in ("cc", "gcc", "clang")),
        "make": shutil.which("make", path=path),
        f"{python}-dev": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    }
    if makes_environment:  # Debian packs it apart
        there[f"{python}-venv"] = importlib.util.find_spec("ensurepip")
    missing = [package for package, found in there.items() if not found]
    if missing or compiler is None:
        raise SetupError(
            "Horovod is built by a C++ compiler; this machine lacks what Debian and Ubuntu have "
            f"as {' '.join(missing)}. Install that and run again. Nothing was changed"
        )
    return compiler


def package_sources(listing: str) -> dict[str, str]:
    """Where pip would look for packages, from the output of `pip config list`.

    As in pip, a variable of the environment overrules `[install]`, and that `[global]`.
    """
    found: dict[str, str] = {}
    settings = [line.partition("=") for line in listing.splitlines() if "=" in line]
    for section in ("global", "install", ":env:"):
        for name, _, value in settings:
            where, _, key = name.strip().rpartition(".")
            key = "timeout" if key == "default-timeout" else key
            if where == section and key in UV_VARIABLES:
                found[key] = " ".join(str(ast.literal_eval(value.strip())).split())
    return {key: value for key, value in found.items() if value}


def link_locations(sources: Mapping[str, str]) -> list[str]:
    """Where pip's find-links point, as absolute paths or addresses.

    Folders that do not exist are left out: pip passes over them, uv would stop.
    """
    places = [os.path.expanduser(place) for place in sources.get("find-links", "").split()]
    return [
        place if "://" in place else os.path.abspath(place)
        for place in places
        if "://" in place or os.path.exists(place)
    ]


def caller_environment(caller: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what could change what is installed or built."""
    return {
        name: value
        for name, value in caller.items()
        if name in KEPT or not (name in DROPPED or name.startswith(DROPPED_PREFIXES))
    }


def cache_folder() -> Path:
    """Where what outlives an environment is kept: `falaj` in XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "falaj"


def child_environment(
    caller: Mapping[str, str], sources: Mapping[str, str], venv: Path
) -> dict[str, str]:
    """What pip, uv and the compilers see."""
    environment = caller_environment(caller)
    for key, value in sources.items():
        environment["PIP_" + key.upper().replace("-", "_")] = value
        environment |= dict.fromkeys(UV_VARIABLES[key], value)
    return environment | {
        "PATH": f"{venv / 'bin'}{os.pathsep}{caller.get('PATH', os.defpath)}",
        "LC_ALL": "C.UTF-8",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "UV_NO_CONFIG": "1",
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        # As with pip all indexes are equal; the lock's digests keep strangers out.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
