"""Every profile keeps the same promises: SQLite, servers, and Spark."""

import os
import re
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest

from tasks.features.access.store import find_service
from tests.support.data.installation import Installation, Refreshed
from tests.support.data.profiles import Servers, choose_server, choose_spark
from tests.support.data.repository import days
from tests.support.host.processes import python, wait_until
from tests.support.suite.promises import Promise, proves

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:feast"),
    pytest.mark.filterwarnings("ignore:The spark:RuntimeWarning"),  # Feast calls it experimental
]
WINDOW = days(0, 3)


def without_pins(name: str) -> str:
    return re.sub(r"@v\d+", "", name)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("local", "cluster")]


@pytest.fixture(params=["server", *OTHERS])
def installation(
    request: pytest.FixtureRequest,
    three_days: Refreshed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Installation:
    if request.param == "cluster":
        choose_spark(monkeypatch, tmp_path)
    if request.param in ("server", "cluster"):
        started: Servers = request.getfixturevalue("running")
        choose_server(monkeypatch, started, started.new_database())
    monkeypatch.setenv("FALAJ_PROFILE", request.param)
    return Installation(tmp_path / "home", three_days[0].repository)


@pytest.mark.slow
@proves(Promise.SAME_FEATURES, "equal values in every profile")
def test_online_and_offline_give_the_same_values_at_the_same_moment(
    installation: Installation,
) -> None:
    tables = installation.refresh(WINDOW)
    installation.materialize(tables, WINDOW)
    feast = installation.open(tables)
    service = find_service(feast, "flight_delay_v1")
    flights = installation.repository.read("flights").tail(40)
    keys = flights[["carrier", "origin", "dest", "tailnum"]].drop_duplicates()
    keys = keys[keys["tailnum"] != "NA"]
    at = pd.Timestamp(WINDOW.end - timedelta(microseconds=1))
    offline = feast.get_historical_features(
        entity_df=keys.assign(event_timestamp=at, asked=range(len(keys))),
        features=service,
        full_feature_names=True,
    ).to_df()
    online = online_values(installation, keys)
    names = [c for c in online if "__" in c and not c.startswith("plane_history")]
    left = offline.rename(columns=without_pins).sort_values("asked")[names].reset_index(drop=True)
    fresh = left.notna()  # expired values are null offline, and stay online
    pd.testing.assert_frame_equal(left.where(fresh), online[names].where(fresh), check_dtype=False)
    assert fresh.to_numpy().mean() > 0.7


@pytest.mark.slow
def test_a_snapshot_is_the_same_in_every_profile(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where values are served from changes nothing of what is trained on."""
    snapshot = installation.snapshot(installation.refresh(WINDOW), days(1, 2))
    profile = os.environ["FALAJ_PROFILE"]
    monkeypatch.delenv("FALAJ_PROFILE", raising=False)
    local = Installation(tmp_path / "other", installation.repository)
    other = local.snapshot(local.refresh(WINDOW), days(1, 2))
    pd.testing.assert_frame_equal(installation.rows(snapshot), local.rows(other))
    assert snapshot.num_rows == other.num_rows > 1000
    if profile != "cluster":  # Spark's file holds the same rows in other bytes
        assert snapshot.data.sha256 == other.data.sha256


def test_an_older_value_never_replaces_a_newer_one_online(installation: Installation) -> None:
    tables = installation.refresh(WINDOW)
    installation.materialize(tables, WINDOW)
    keys = some_keys(installation)
    before = online_values(installation, keys)
    (installation.home / "feast" / "materialized.json").unlink()
    installation.materialize(tables, days(0, 1))
    pd.testing.assert_frame_equal(online_values(installation, keys), before)


@pytest.mark.slow
def test_a_removed_online_store_is_filled_again_with_all_of_history(
    installation: Installation, request: pytest.FixtureRequest
) -> None:
    tables = installation.refresh(WINDOW)
    once = installation.materialize(tables, WINDOW)
    keys = some_keys(installation)
    before = online_values(installation, keys)
    if "FALAJ_REDIS" in os.environ:
        with request.getfixturevalue("running").redis.connect() as client:
            client.flushall()
    for file in (installation.home / "feast").glob("online.db*"):
        file.unlink()
    assert installation.materialize(tables, days(2, 1)) == once
    pd.testing.assert_frame_equal(online_values(installation, keys), before)


MATERIALIZE = """
import sys
from pathlib import Path
from tasks.features.online.materialization import materialize
from tasks.features.tables.build import FeatureTables
from tasks.kernel.settings import Settings
from tests.support.data.repository import days
settings = Settings(home=Path(sys.argv[1]), feature_repo=Path(sys.argv[2]))
tables = FeatureTables.model_validate_json(sys.argv[3])
materialize(tables, days(0, 3), settings)
"""


@pytest.mark.slow
def test_a_materialization_killed_midway_leaves_readers_served_and_is_completed_by_the_next(
    installation: Installation,
) -> None:
    tables = installation.refresh(WINDOW)
    home, repo = str(installation.home), str(installation.repository.path)
    line = ("-c", MATERIALIZE, home, repo, tables.model_dump_json())
    process = python(*line, stderr=subprocess.DEVNULL)

    def third_view_is_being_written() -> bool:
        begun = [act for act in installation.acts("materialize") if act["outcome"] == "begun"]
        return len(begun) >= 3 or process.poll() is not None

    wait_until(third_view_is_being_written, "three views begun", limit_s=900)  # of Spark, when busy
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (installation.home / "feast" / "materialized.json").exists()
    installation.online("weather:temp", origin="JFK")
    completed = installation.materialize(tables, WINDOW)
    assert len(completed) == 7
    assert all(completed.values())
    assert online_values(installation, some_keys(installation)).notna().to_numpy().mean() > 0.5


def some_keys(installation: Installation) -> pd.DataFrame:
    flights = installation.repository.read("flights").tail(20)
    return flights[["carrier", "origin", "dest", "tailnum"]].drop_duplicates()


def online_values(installation: Installation, keys: pd.DataFrame) -> pd.DataFrame:
    """What a new reader gets for these entities."""
    feast = installation.open()
    service = find_service(feast, "flight_delay_v1")
    answer = feast.get_online_features(
        features=service, entity_rows=keys.to_dict("records"), full_feature_names=True
    )
    frame: pd.DataFrame = answer.to_df().rename(columns=without_pins)
    return frame
