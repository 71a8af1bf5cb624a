"""What counts as a queue: on Prefect's server, and by the query of a cluster on PostgreSQL."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from infra.platform import api as platform_api
from infra.platform.scaling import ScalingRule, manifests
from tests.support.services.prefect_platform import PrefectApi
from tests.support.services.servers import postgres_server

pytestmark = pytest.mark.timeout(120)

QUEUES = {name: (None, False) for name in ("default", "urgent")}
QUEUES |= {"narrow": (2, False), "paused": (None, True)}
"""Limit of each, and whether it is paused."""
RUNS = [
    *[("default", "a", "SCHEDULED", "Scheduled", -60)] * 2,
    ("default", "a", "SCHEDULED", "Scheduled", 3600),
    *[("paused", "a", "SCHEDULED", "Scheduled", -60)] * 3,
    ("narrow", "a", "PENDING", "Pending", -60),
    *[("narrow", "a", "SCHEDULED", "Scheduled", -60)] * 3,
    ("urgent", "a", "RUNNING", "Running", -60),
    ("default", "b", "RUNNING", "Running", -60),
    ("default", "b", "SCHEDULED", "AwaitingConcurrencySlot", -60),
    ("default", "c", "SCHEDULED", "AwaitingConcurrencySlot", -60),
]
"""Queue, deployment, type and name of the state, and when it is due, in seconds from now."""
GIVEN, ACTIVE = 2 + 1 + 1, 3


def test_the_supervisor_counts_what_a_worker_would_be_given(
    prefect_api: PrefectApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, moment = f"scaled-{uuid4().hex[:6]}", datetime.now(UTC)
    api = platform_api.PrefectApi(prefect_api.url, prefect_api.auth_string)
    header = platform_api.basic_auth(prefect_api.auth_string)
    with httpx.Client(base_url=prefect_api.url, headers=header) as client:

        def ask(path: str, method: str = "POST", **body: object) -> Any:
            reply = client.request(method, path, json=body)
            assert reply.is_success, reply.text
            return reply.json() if reply.content else None

        def start(of: str, queue: str, kind: str, name: str, due_s: float) -> None:
            due = {"scheduled_time": (moment + timedelta(seconds=due_s)).isoformat()}
            first = {"type": "SCHEDULED", "name": "Scheduled", "state_details": due}
            run = ask(f"/deployments/{of}/create_flow_run", state=first, work_queue_name=queue)
            if name != "Scheduled":
                state = {"type": kind, "name": name, "state_details": due}
                ask(f"/flow_runs/{run['id']}/set_state", state=state, force=True)

        def deployment(name: str, of_pool: str) -> str:
            made = ask("/deployments/", name=name, flow_id=flow, work_pool_name=of_pool)
            return str(made["id"])

        flow = ask("/flows/", name=pool)["id"]
        ask("/work_pools/", name=pool, type="process")
        for queue, (limit, is_paused) in [*QUEUES.items()][1:]:
            described = {"concurrency_limit": limit, "is_paused": is_paused}
            ask(f"/work_pools/{pool}/queues", name=queue, **described)
        deployments = {name: deployment(name, pool) for name in "abc"}
        for queue, name, *state in RUNS:
            start(deployments[name], queue, *state)
        assert platform_api.demand(api, pool) == (GIVEN, ACTIVE)
        monkeypatch.setattr(platform_api, "COORDINATOR", pool)
        assert platform_api.num_running_loops(api) == 1
        ask(f"/work_pools/{pool}", "PATCH", concurrency_limit=ACTIVE + 3)
        assert platform_api.demand(api, pool) == (3, ACTIVE)
        ask(f"/work_pools/{pool}", "PATCH", is_paused=True)
        assert platform_api.demand(api, pool) == (0, ACTIVE)


TABLES = """
CREATE TABLE work_pool (id text PRIMARY KEY, name text, concurrency_limit int, is_paused bool);
CREATE TABLE work_queue (
    id text PRIMARY KEY, work_pool_id text, name text, concurrency_limit int, is_paused bool);
CREATE TABLE flow_run (
    work_queue_id text, deployment_id text, state_type text, state_name text,
    next_scheduled_start_time timestamptz)
"""
"""Of Prefect's tables, the columns that count; a unit test holds their names against Prefect's."""


def test_the_query_of_a_cluster_counts_the_same_and_one_while_a_loop_runs(tmp_path: Path) -> None:
    pools = {"cpu": (None, False), "few": (ACTIVE + 3, False), "off": (None, True)}
    pools |= {"gpu": (None, False), "coordinator": (None, False)}
    rules = {pool: ScalingRule(least=0) for pool in pools}
    queries = {
        one["metadata"]["name"].removeprefix("falaj-worker-"): one["spec"]["triggers"][0][
            "metadata"
        ]["query"]
        for one in manifests(rules, "falaj")
        if one["kind"] == "ScaledObject"
    }
    with postgres_server(tmp_path) as uri, psycopg.connect(uri, autocommit=True) as database:

        def add(table: str, *values: object) -> None:
            places = ", ".join(["%s"] * len(values))
            database.execute(f"INSERT INTO {table} VALUES ({places})".encode(), values)

        def counted() -> dict[str, int]:
            rows = {pool: database.execute(query.encode()) for pool, query in queries.items()}
            return {pool: int(row.fetchone()[0]) for pool, row in rows.items()}

        database.execute(TABLES.encode())
        for pool, place in pools.items():
            add("work_pool", pool, pool, *place)
            for queue, limits in QUEUES.items():
                add("work_queue", f"{pool}/{queue}", pool, queue, *limits)
            for queue, name, *state, due_s in RUNS if pool in ("cpu", "few", "off") else ():
                due = datetime.now(UTC) + timedelta(seconds=due_s)
                add("flow_run", f"{pool}/{queue}", f"{pool}/{name}", *state, due)
        add("flow_run", "coordinator/urgent", "sweep", "RUNNING", "Running", datetime.now(UTC))
        wanted = {"cpu": GIVEN + ACTIVE, "few": ACTIVE + 3, "off": ACTIVE}
        assert counted() == wanted | {"gpu": 0, "coordinator": 1}
        add("flow_run", "coordinator/default", "loop", "RUNNING", "Running", datetime.now(UTC))
        assert counted() == wanted | {"gpu": 1, "coordinator": 2}
