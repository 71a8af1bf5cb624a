"""Profiles for tests: the environment that each needs, with real servers behind it."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.features.access import profile
from tests.support.services.servers import RedisServer, new_database, postgres_server, redis_server

SPARK = {
    "spark.master": "local[1]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
}


def write_profiles(repo: Path, project: str = "flights") -> Path:
    """Give a repository profiles of its own, like the built-in ones, to change; returns `local`."""
    (repo / "profiles").mkdir(parents=True, exist_ok=True)
    for file in Path(profile.__file__).with_name("profiles").glob("*.yaml"):
        name = "feature_store.yaml" if file.stem == "local" else f"profiles/{file.name}"
        (repo / name).write_text(file.read_text().replace("${FALAJ_PROJECT}", project))
    return repo / "feature_store.yaml"


@dataclass(frozen=True)
class Servers:
    """A Redis and a PostgreSQL server."""

    redis: RedisServer
    postgres_uri: str

    def new_database(self) -> str:
        """Address of an empty database, as the registry takes it."""
        return new_database(self.postgres_uri).replace("postgresql://", "postgresql+psycopg://")


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    """Both servers, empty."""
    with redis_server(folder) as redis, postgres_server(folder) as postgres:
        yield Servers(redis, postgres)


def choose_server(patch: pytest.MonkeyPatch, running: Servers, registry: str) -> None:
    """Use profile `server` on an emptied Redis and the given registry."""
    with running.redis.connect() as client:
        client.flushall()
    patch.setenv("FALAJ_PROFILE", "server")
    patch.setenv("FALAJ_REDIS", running.redis.connection_string)
    patch.setenv("FALAJ_REGISTRY_URL", registry)


def choose_spark(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let profile `cluster` run Spark in local mode; skip the test where it is missing.

    Call it before `choose_server`, and name the profile afterwards.
    """
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("profile `cluster` needs pyspark, which is not in the lock: make test-cluster")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("profile `cluster` needs Java 17 or newer")
    (folder / "spark").mkdir()
    settings = [f"{name} {value}\n" for name, value in SPARK.items()]
    (folder / "spark" / "spark-defaults.conf").write_text("".join(settings))
    patch.setenv("SPARK_CONF_DIR", str(folder / "spark"))
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    patch.setenv("PYSPARK_PYTHON", sys.executable)
