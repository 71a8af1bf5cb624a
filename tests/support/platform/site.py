"""A platform whose state is on servers, and machines of their own that may work for it."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psycopg

from infra.bench.operation.state import BUCKET, state_variables
from infra.bench.processes import S3_KEY, RedisServer, postgres_server, redis_server, s3_server
from infra.platform.config import DATABASE_URL, REDIS_URL
from tests.support.host.clocks import Clock
from tests.support.host.machines import DISK, HOST, Machine, machines, variables
from tests.support.host.relay import relayed
from tests.support.platform.whole_platform import WholePlatform, whole_platform
from tests.support.services.restarting import Server
from tests.support.services.servers import new_database
from tests.support.state import make_bucket

POOL = "cpu-far"
"""A hardware class of the machines alone: on the host its name asks for more than there is."""
FAR, NEAR = (
    f"{POOL}: {{description: machines of their own, requires: {{memory_gib: {gib}}}}}\n"
    for gib in (0, 65536)
)
LOCKS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


@dataclass
class Site:
    """The platform on the host, and its machines.

    Attributes:
        variables: that name the state and the platform, as a machine reaches them.
        s3, database: as the host reaches them.
        servers: those that a test ends and starts again.
    """

    platform: WholePlatform
    variables: dict[str, str]
    machines: list[Machine]
    s3: str
    database: str
    redis: RedisServer
    folder: Path
    servers: dict[str, Server] = field(default_factory=dict)
    keys: ClassVar = {"aws_access_key_id": S3_KEY, "aws_secret_access_key": S3_KEY}

    def log(self, machine: Machine) -> str:
        """What its worker, and the runs that it took, have said."""
        file = self.folder / f"{machine.name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start_worker(self, machine: Machine, clock: Clock | None = None, **changed: str) -> None:
        """`falaj worker` on a machine, which has the project without its raw rows."""
        shutil.copytree(
            self.platform.repository.path,
            machine.disk / "repo",
            ignore=shutil.ignore_patterns("*.parquet", "*.csv"),
            dirs_exist_ok=True,
        )
        (machine.disk / "hardware.yaml").write_text(FAR)
        told = {
            **variables(**self.variables),
            **(clock.environment if clock else {}),
            "FALAJ_HARDWARE": str(DISK / "hardware.yaml"),
            "PREFECT_API_AUTH_STRING": self.platform.password,
            **changed,
        }
        words = [sys.executable, "-u", "-m", "falaj", "worker", POOL]
        machine.start(words, told, self.folder / f"{machine.name}.log")

    def start_loop(self, **changes: Any) -> str:
        """A loop whose training is for a pool of the machines alone."""
        routing = {"training": {"hardware_class": POOL, "wait_s": 900}}
        return self.platform.start_loop(routing=routing, **changes)


@contextmanager
def site(folder: Path, names: Sequence[str], programs: Path | None = None) -> Iterator[Site]:
    """A site with machines of these names, none of which works yet.

    Args:
        programs: of a PostgreSQL with `pg_trgm`, on which Prefect then has its records too, and
            its messages in Redis.
    """
    with ExitStack() as stack:
        made = stack.enter_context(machines(*names))
        s3 = stack.enter_context(s3_server())
        make_bucket(s3, BUCKET)
        database = stack.enter_context(postgres_server(folder, programs))
        redis = stack.enter_context(redis_server(folder, "--appendonly", "yes"))
        near = state_variables(s3, database, redis.connection_string)
        options: tuple[str, ...] = ("--no-serving",)
        if programs is not None:
            redis_url = f"redis://{redis.connection_string}/0"
            near |= {DATABASE_URL: new_database(database), REDIS_URL: redis_url}
            options = (*options, "--profile", "server")
        near["FALAJ_HARDWARE"] = str(folder / "hardware.yaml")
        (folder / "hardware.yaml").write_text(NEAR)
        platform = stack.enter_context(whole_platform(folder, *options, environment=near))
        seen = {}
        api = f"http://127.0.0.1:{platform.port}/api"
        urls = {"s3": s3, "database": database, "redis": redis.connection_string, "api": api}
        for name, url in urls.items():
            seen[name] = stack.enter_context(relayed(HOST, url))
        far = state_variables(seen["s3"], seen["database"], seen["redis"])
        far["PREFECT_API_URL"] = seen["api"]
        yield Site(platform, far, made, s3, database, redis, folder)


def locks_held(database: str) -> int:
    """Advisory locks of a PostgreSQL server, in all its databases; -1 while it starts."""
    try:
        with psycopg.connect(database) as connection:
            ((held,),) = connection.execute(LOCKS).fetchall()
    except psycopg.OperationalError:
        return -1
    return int(held)


def builds_of(homes: Iterable[Path]) -> Counter[tuple[str, str]]:
    """How often machines with these state folders have built each thing, all together."""
    journals = [home / "artifacts" / "builds.jsonl" for home in homes]
    lines = [line for each in journals if each.exists() for line in each.read_text().splitlines()]
    return Counter((build["kind"], build["key"]) for build in map(json.loads, lines))
