"""What counts as a queue: on Prefect's server, and on PostgreSQL by the query of a cluster."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
from prefect.server.database.orm_models import Base
from sqlalchemy.dialects import postgresql

from infra.platform import api as platform_api
from infra.platform.scaling import ScalingRule, manifests
from tests.support.services.prefect_platform import PrefectApi
from tests.support.services.servers import postgres_server

QUEUES = {"urgent": (None, False), "narrow": (2, False), "paused": (None, True)}
"""Limit of each, and whether it is paused."""
RUNS = [
    *[("default", "a", "SCHEDULED", "Scheduled", -60)] * 2,
    ("default", "a", "SCHEDULED", "Scheduled", 3600),
    *[("paused", "a", "SCHEDULED", "Scheduled", -60)] * 3,
    ("narrow", "a", "PENDING", "Pending", -60),
    *[("narrow", "a", "SCHEDULED", "Scheduled", -60)] * 3,
    ("urgent", "a", "RUNNING", "Running", -60),
    ("default", "b", "SCHEDULED", "AwaitingConcurrencySlot", -60),
    ("default", "c", "SCHEDULED", "AwaitingConcurrencySlot", -60),
    ("default", "b", "RUNNING", "Running", -60),
]
"""Queue, deployment, type and name of the state, and when it is due, in seconds from now."""
GIVEN, ACTIVE = 2 + 1 + 1, 3
DIALECT, TABLES = postgresql.dialect(), ("work_pool", "work_queue", "flow_run")


def test_what_a_worker_would_be_given_counts_and_what_is_held_on_purpose_does_not(
    prefect_api: PrefectApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool, header = f"scaled-{uuid4().hex}", platform_api.basic_auth(prefect_api.auth_string)
    api = platform_api.PrefectApi(prefect_api.url, prefect_api.auth_string)
    monkeypatch.setattr(platform_api, "COORDINATOR", pool)

    def ask(path: str, method: str = "POST", **body: object) -> Any:
        reply = httpx.request(method, f"{api.url}/{path}", json=body, headers=header)
        return reply.json() if reply.content else None

    flow, pools = ask("flows/", name=pool)["id"], f"work_pools/{pool}"
    ask("work_pools/", name=pool, type="process")
    for queue, (limit, is_paused) in QUEUES.items():
        ask(f"{pools}/queues", name=queue, concurrency_limit=limit, is_paused=is_paused)
    for queue, name, kind, state, due_s in RUNS:
        # The first by its name is a person's own.
        told = {} if name == "a" else {"env": {platform_api.EXPECTED: "state"}}
        of = ask("deployments/", name=name, flow_id=flow, work_pool_name=pool, job_variables=told)
        due = {"scheduled_time": str(datetime.now(UTC) + timedelta(seconds=due_s))}
        begun = {"type": kind, "name": state, "state_details": due}
        run = ask(f"deployments/{of['id']}/create_flow_run", state=begun, work_queue_name=queue)
    assert api.expected_state(pool) == "state"

    with postgres_server(tmp_path) as uri, psycopg.connect(uri, autocommit=True) as database:
        for kind in ("state_type", "work_queue_status", "work_pool_status"):
            database.execute(f"CREATE DOMAIN {kind} AS text".encode())
        for table in TABLES:
            known = Base.metadata.tables[table].columns
            columns = ", ".join(f'"{c.name}" {c.type.compile(DIALECT)}' for c in known)
            database.execute(f"CREATE TABLE {table} ({columns}, PRIMARY KEY (id))".encode())

        def by_query(name: str = pool) -> int:
            described, queues = api.pool(pool)
            queues = [{**queue, "work_pool_id": described["id"]} for queue in queues]
            runs = api.runs(["SCHEDULED", "PENDING", "RUNNING"], [pool])
            for table, rows in zip(TABLES, ([described], queues, runs), strict=True):
                filled = f"SELECT * FROM json_populate_recordset(NULL::{table}, %s)"
                database.execute(f"TRUNCATE {table}".encode())
                database.execute(f"INSERT INTO {table} {filled}".encode(), [json.dumps(rows)])
            [workers, _] = manifests({name: ScalingRule(least=0)}, "falaj")
            query = workers["spec"]["triggers"][0]["metadata"]["query"]
            query = query.replace("'coordinator'", f"'{pool}'")
            return int(database.execute(query.encode()).fetchall()[0][0])

        limit = {"concurrency_limit": ACTIVE + 3}
        for given, change in ((GIVEN, {}), (3, limit), (0, {"is_paused": True})):
            ask(pools, "PATCH", **change)
            seen = (*platform_api.demand(api, pool), by_query())
            assert seen == (given, ACTIVE, given + ACTIVE)
        assert platform_api.num_running_loops(api) == by_query("gpu") == 1
        ask(f"flow_runs/{run['id']}/set_state", state={"type": "COMPLETED"}, force=True)
        assert platform_api.num_running_loops(api) == by_query("gpu") == 0, "one is urgent"
