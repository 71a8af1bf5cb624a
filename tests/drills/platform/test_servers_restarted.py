"""PostgreSQL and Redis are stopped, or killed, and started again while a loop runs on them.

The platform's profile `server`. Redis keeps nothing on disk here, so it comes back empty.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
import psycopg
import pytest

from infra.platform.config import DATABASE_URL, REDIS_URL
from tests.support.host.processes import wait_until
from tests.support.platform.whole_platform import LIMIT_S, WholePlatform, whole_platform
from tests.support.services.restarting import Server, end_started
from tests.support.services.servers import (
    answers,
    postgres_server,
    postgres_with_trigrams,
    redis_server,
)
from tests.support.suite.promises import Promise, proves

PROGRAMS = postgres_with_trigrams()
pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(0),
    pytest.mark.skipif(PROGRAMS is None, reason="no PostgreSQL with pg_trgm is installed here"),
]

AWAY_S = 8.0


@dataclass
class Servers:
    """Where both are, and a hand on each."""

    uri: str
    redis_url: str
    postgresql: Server
    redis: Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        uri = stack.enter_context(postgres_server(folder, PROGRAMS))
        redis = stack.enter_context(redis_server(folder))
        stack.callback(end_started)
        with psycopg.connect(uri) as connection:
            postmaster = psutil.Process(connection.info.backend_pid).parent()
        yield Servers(
            uri,
            f"redis://127.0.0.1:{redis.port}/0",
            Server(tuple(postmaster.cmdline()), postmaster.pid),
            Server(redis.command, redis.pid),
        )


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> Iterator[WholePlatform]:
    addresses = {DATABASE_URL: servers.uri, REDIS_URL: servers.redis_url}
    folder = tmp_path_factory.mktemp("on-servers")
    with whole_platform(folder, "--profile", "server", environment=addresses) as platform:
        yield platform


@proves(Promise.INTERRUPT, "databases restarted: completed, no stage repeated")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_loop_goes_on_when_postgresql_and_redis_are_restarted_under_it(
    platform: WholePlatform, servers: Servers, number: signal.Signals
) -> None:
    account = platform.account
    platform.renew_data()
    platform.until_well()
    loop = platform.start_loop(training={"max_epochs": 60, "patience": 60})

    def stage_goes_on(name: str) -> bool:
        return account.stage_runs(loop).get(name) == ["Running"]

    def restart(server: Server) -> None:
        server.restart(number, AWAY_S)
        wait_until(lambda: answers(servers.uri), "PostgreSQL answers", 60)

    wait_until(lambda: stage_goes_on("feature-refresh"), "the refresh", LIMIT_S)
    restart(servers.postgresql)
    wait_until(lambda: stage_goes_on("training"), "the training", LIMIT_S)
    restart(servers.redis)
    restart(servers.postgresql)

    platform.check_completed_once(loop)
    platform.until_well()
