"""Two platforms - servers and state folders of their own - on one database of operation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from prefect.client.orchestration import get_client
from prefect.states import Cancelled

from tests.support.control import builders
from tests.support.control.platforms import (
    ControlledPlatform,
    acting,
    controlled_platform,
    num_unanswered,
    outcomes,
)
from tests.support.services.servers import postgres_server
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

ASKED = 4
"""Decisions about one result that each platform makes at once."""


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ControlledPlatform]]:
    """Two platforms without workers, so that only what is called here asks the controller."""
    folder = tmp_path_factory.mktemp("platforms")
    with (
        controlled_platform(folder / "north", works=False) as north,
        controlled_platform(folder / "south", works=False) as south,
    ):
        yield [north, south]


@pytest.fixture(params=["sqlite", "postgresql"])
def platforms(
    request: pytest.FixtureRequest, servers: list[ControlledPlatform], tmp_path: Path
) -> list[ControlledPlatform]:
    """The two, on a database that is new."""
    url = f"sqlite:///{tmp_path / 'operation.db'}"
    if request.param == "postgresql":
        server: str = request.getfixturevalue("postgres")
        with psycopg.connect(server) as connection:
            connection.execute("CREATE SCHEMA IF NOT EXISTS shared")
        url = f"{server}&options=-csearch_path%3Dshared"
    return [ControlledPlatform(one.folder, url, one.api) for one in servers]


def runs_of(platforms: list[ControlledPlatform]) -> list[str]:
    """Keys of this database's incidents under which either server has a run."""
    incidents = set(acting(platforms[0]))
    return sorted(key for one in platforms for key, _ in one.retrainings() if key in incidents)


def ask_all(platforms: list[ControlledPlatform], result: str) -> None:
    """Let both answer the same result at once, several times."""
    asked = [one.decide(result) for _ in range(ASKED) for one in platforms]
    for process in asked:
        said, _ = process.communicate(timeout=900)
        assert process.returncode == 0, said


def sweep_all(platforms: list[ControlledPlatform]) -> None:
    for platform in platforms:
        platform.sweep()


@proves(Promise.TWO_PLATFORMS, "one result stored by both: one run on one of them")
def test_one_result_on_two_platforms_starts_one_retraining_and_the_next_incident_another(
    platforms: list[ControlledPlatform],
) -> None:
    # The servers have seen the runs of the other database: its incidents have other keys.
    week = 10 if platforms[0].url.startswith("postgresql") else 0
    first = {platform.judge(builders.stale(week)) for platform in platforms}
    assert len(first) == 1
    ask_all(platforms, *first)
    sweep_all(platforms)
    assert runs_of(platforms) == acting(platforms[0])
    assert states(platforms[0]) == ["started"], "a run of the other platform is not 'deleted'"

    for platform in platforms:
        platform.judge(builders.stable(week + 1))
    second = {platform.judge(builders.stale(week + 2)) for platform in platforms}
    ask_all(platforms, *second)
    sweep_all(platforms)
    assert len(runs_of(platforms)) == 2
    assert runs_of(platforms) == sorted(acting(platforms[0]))
    assert outcomes(platforms[0]) == ["acts", "nothing_to_do", "acts"]
    assert num_unanswered(platforms[0]) == 0

    cancel_all(platforms)
    sweep_all(platforms)
    assert states(platforms[0]) == ["cancelled", "cancelled"], "its own platform notes the end"


def states(platform: ControlledPlatform) -> list[str]:
    """How far each claim has come, or how its run ended."""
    found = platform.operation(
        "SELECT coalesce(run_state, state) FROM falaj_claims ORDER BY claimed_at"
    )
    return [state for (state,) in found]


def cancel_all(platforms: list[ControlledPlatform]) -> None:
    """Cancel every run of the loop on its own server."""
    for platform in platforms:
        runs = platform.prefect(
            "SELECT run.id FROM flow_run AS run JOIN flow ON flow.id = run.flow_id "
            "WHERE flow.name = 'pipeline' AND run.state_type = 'SCHEDULED'"
        )
        with platform.api.in_process(), get_client(sync_client=True) as client:
            for (run,) in runs:
                client.set_flow_run_state(run, Cancelled(), force=True)
