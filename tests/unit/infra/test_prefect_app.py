"""A busy database: locks end, one line is logged; an idle server rests."""

import asyncio
import gc
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from docket import Docket, Worker
from sqlalchemy.exc import OperationalError

from infra.platform import apps
from tests.support.host.processes import wait_until


def test_prefects_background_worker_looks_at_its_clock_as_often_as_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    background_workers: Any = import_module("prefect.server.api.background_workers")
    made: list[Worker] = []

    class Kept(Worker):
        async def __aenter__(self) -> Worker:
            made.append(self)
            return await super().__aenter__()

    async def start_and_end() -> None:
        async with (
            Docket(name="test", url="memory://") as docket,
            background_workers.background_worker(docket, webserver_only=True),
        ):
            pass

    monkeypatch.setattr(background_workers, "Worker", Kept)
    apps.rest_longer()
    asyncio.run(start_and_end())
    [worker] = made
    assert worker.minimum_check_interval == apps.LOOK_EVERY
    assert worker.scheduling_resolution == apps.LOOK_EVERY


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's and SQLAlchemy's SQLite as the server has them, for one test."""
    prefects: Any = import_module("prefect.server.database.configurations").AioSqliteConfiguration
    adapted: Any = import_module("sqlalchemy.dialects.sqlite.aiosqlite")
    connection = adapted.AsyncAdapt_aiosqlite_connection
    for kept, name in (
        (prefects, "begin_transaction"),
        (connection, "_terminate_graceful_close"),
        (connection, "_terminate_force_close"),
    ):
        monkeypatch.setattr(kept, name, getattr(kept, name))
    apps.begin_as_writer()
    apps.roll_back_when_dropped()


def can_write(file: Path) -> bool:
    with closing(sqlite3.connect(file, timeout=0, isolation_level=None)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


@asynccontextmanager
async def database(file: Path) -> AsyncIterator[tuple[Any, Any]]:
    """Prefect's configuration and engine of a new database with one table."""
    module: Any = import_module("prefect.server.database.configurations")
    configuration = module.AioSqliteConfiguration(connection_url=f"sqlite+aiosqlite:///{file}")
    engine = await configuration.engine()
    async with engine.begin() as connection:
        await connection.execute(sa.text("CREATE TABLE t (a INTEGER)"))
    yield configuration, engine
    await engine.dispose()


async def read_and_write(configuration: Any, engine: Any) -> None:
    session = await configuration.session(engine)
    async with session, configuration.begin_transaction(session):
        await session.execute(sa.text("SELECT count(*) FROM t"))
        await session.execute(sa.text("INSERT INTO t VALUES (1) RETURNING a"))


def test_no_cancellation_of_a_transaction_leaves_the_database_locked(
    mended: None, tmp_path: Path
) -> None:
    file = tmp_path / "x.db"

    async def cancel_everywhere() -> int:
        async with database(file) as made:
            num_steps = 0
            while True:
                task = asyncio.create_task(read_and_write(*made))
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                if task.done():
                    return num_steps
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                wait_until(lambda: can_write(file), f"unlocked after {num_steps} steps", 10, 0.001)
                num_steps += 1

    gc.disable()  # which would end the lock some time
    try:
        assert asyncio.run(cancel_everywhere()) > 10
    finally:
        gc.enable()


def test_a_transaction_that_reads_first_waits_for_the_writer_before_it(
    mended: None, tmp_path: Path
) -> None:
    async def write_together() -> int:
        async with database(tmp_path / "x.db") as made:
            await asyncio.gather(*(read_and_write(*made) for _ in range(4)))
            async with made[1].connect() as connection:
                count = await connection.execute(sa.text("SELECT count(*) FROM t"))
            return int(count.scalar_one())

    assert asyncio.run(write_together()) == 4


def test_a_locked_database_is_one_line_in_the_log_and_other_errors_keep_their_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("prefect.server.utilities.worker_channel")
    factory = logging.getLogRecordFactory()
    apps.log_busy_in_one_line()
    try:
        for said in ("database is locked", "no such table: run"):
            try:
                raise OperationalError("UPDATE", {}, sqlite3.OperationalError(said)) from (
                    sqlite3.OperationalError(said)
                )
            except OperationalError:
                with caplog.at_level(logging.ERROR, logger.name):
                    logger.exception("Heartbeat of %s failed", "w")
    finally:
        logging.setLogRecordFactory(factory)
    busy, other = caplog.records
    assert (busy.getMessage(), busy.exc_info) == (
        "Heartbeat of w failed: SQLite: database is locked",
        None,
    )
    assert other.exc_info is not None


@pytest.mark.parametrize(
    ("api_url", "origin"),
    [("/api", ""), ("http://falaj.example.org:4200/api", "http://falaj.example.org:4200")],
)
def test_pages_may_use_their_own_server_and_no_other_address(api_url: str, origin: str) -> None:
    directives = dict(
        part.strip().split(" ", 1) for part in apps.content_security_policy(api_url).split(";")
    )
    assert directives["default-src"] == "'self'"
    allowed = {word for words in directives.values() for word in words.split()}
    words = {"'self'", "'none'", "'unsafe-eval'", "'unsafe-inline'", "data:", "blob:"}
    assert allowed - words == ({origin} if origin else set())
    assert "'unsafe-inline'" not in directives["script-src"]
