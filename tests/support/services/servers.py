"""Real servers for tests: Redis, PostgreSQL and S3; see `infra.bench.processes`."""

from pathlib import Path
from uuid import uuid4

import psycopg

from infra.bench.processes import RedisServer as RedisServer
from infra.bench.processes import answers as answers
from infra.bench.processes import postgres_server as postgres_server
from infra.bench.processes import redis_server as redis_server
from infra.bench.processes import s3_server as s3_server
from infra.orchestration.embedded import free_port as free_port


def new_database(server: str) -> str:
    """URI of an empty database of its own on a server whose URI is given."""
    name = f"t{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.replace("/postgres?", f"/{name}?")


def admit(server: str, network: str) -> None:
    """Let a PostgreSQL that listens there take connections from a network."""
    with psycopg.connect(server, autocommit=True) as connection:
        rule = f"SELECT 'host all all {network} trust'"
        connection.execute(f"COPY ({rule}) TO PROGRAM 'cat >> pg_hba.conf'".encode())
        connection.execute("SELECT pg_reload_conf()")


def postgres_with_trigrams() -> Path | None:
    """Folder of a PostgreSQL with `pg_trgm`, which Prefect needs and the tests' package lacks."""
    for programs in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (programs.parent / "lib" / "pg_trgm.so").exists():
            return programs
    return None
