"""The loop with its state on S3, PostgreSQL and Redis of this host, beside one in a folder.

SeaweedFS counts the bytes that it sends: a second machine, with an empty disk, brings what its
rerun uses. All loops run one after the other on the same cores as the servers.
"""

import re
from contextlib import ExitStack
from pathlib import Path

import boto3
import httpx

from infra.bench.figures import Measured, at_most
from infra.bench.loop import run_measured
from infra.bench.parts import Bench
from infra.bench.processes import S3_KEY, postgres_server, redis_server, s3_server
from infra.bench.running import loop_environment
from infra.orchestration.embedded import free_port
from tasks.kernel.files import make_folder, size_of

BUCKET = "lake"
SENT = re.compile(
    rf'^SeaweedFS_s3_bucket_traffic_sent_bytes_total{{bucket="{BUCKET}"}} ([0-9.e+]+)', re.MULTILINE
)


def figures(bench: Bench) -> Measured:
    """What the servers add to the first run, and how much a rerun on another machine reads."""
    log, port, own = bench.folder / "log.txt", free_port(), loop_environment(bench)

    def run(name: str, told: dict[str, str]) -> float:
        home = str(bench.folder / name)
        return run_measured(["-m", "falaj", "--home", home, "run"], log, own | told).wall_s

    with ExitStack() as stack:
        s3 = stack.enter_context(s3_server(f"-metricsPort={port}"))
        database = stack.enter_context(postgres_server(make_folder(bench.folder / "postgresql")))
        redis = stack.enter_context(redis_server(make_folder(bench.folder / "redis")))
        keys = {"aws_access_key_id": S3_KEY, "aws_secret_access_key": S3_KEY}
        client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=BUCKET)
        servers = state_variables(s3, database, redis.connection_string)
        here, there = run("here", {}), run("machine-1", servers)
        again_here, again = run("here", {}), run("machine-1", servers)
        before = _sent(port)
        elsewhere = run("machine-2", servers)
        read, used = _sent(port) - before, _copies(bench.folder / "machine-2")
    again_said = f"in a folder {again_here:.0f} s; on a second machine {elsewhere:.0f} s"
    walls = f"{there:.0f}, {here:.0f} s"
    return [
        at_most("loop on S3 and PostgreSQL, wall", there / here, 1.25, walls),
        at_most("unchanged rerun on S3, s", again, 15, again_said),
        at_most("bytes read to bytes used", read / used, 1.2, f"{read / 1e6:.1f} MB were read"),
    ]


def state_variables(s3: str, database: str, redis: str) -> dict[str, str]:
    """What names a state on these servers."""
    return {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ACCESS_KEY_ID": S3_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_KEY,
        "AWS_REGION": "us-east-1",
        "FALAJ_STATE": f"s3://{BUCKET}/state",
        "FALAJ_DATABASE_URL": database,
        "FALAJ_REGISTRY_URL": database.replace("postgresql:", "postgresql+psycopg:"),
        "FALAJ_REDIS": redis,
        "FALAJ_PROFILE": "server",
    }


def _sent(port: int) -> float:
    found = SENT.search(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text)
    return float(found[1]) if found else 0.0


def _copies(home: Path) -> int:
    """Bytes of what a machine has brought: its whole state folder, but for what it made itself."""
    made = ("prefect", "spill", "training", "leases")
    return sum(size_of(path) for path in home.iterdir() if path.name not in made)
