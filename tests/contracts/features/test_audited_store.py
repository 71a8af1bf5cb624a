"""What the SDK does with the feature store is in the audit; Feast's own tools read the profiles."""

import asyncio
import getpass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from feast import FeatureStore

from falaj.__main__ import main
from tasks.features.access.audit import AuditTrail, on_behalf_of
from tasks.features.access.store import apply_definitions, open_store
from tasks.features.tables.build import features_folder
from tasks.kernel.errors import FeatureStoreError, WindowError
from tests.support.data.installation import GATES, Installation
from tests.support.data.repository import days

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
WINDOW = days(0, 1)
SOON = datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """One day, applied and materialized on behalf of a flow run."""
    installation = Installation.at(tmp_path_factory.mktemp("one"), num_days=1)
    with on_behalf_of("0f8b5f0e"):
        installation.materialize(installation.refresh(WINDOW), WINDOW)
    return installation


def acts(made: Installation, action: str) -> list[dict[str, Any]]:
    lines = AuditTrail(made.home / "audit").lines()
    return [line.content for line in lines if line.content["action"] == action]


def opened(made: Installation) -> FeatureStore:
    tables = made.refresh(WINDOW)
    return open_store(made.home, made.repository.path, features_folder(tables, made.store))


def test_an_apply_says_which_views_and_who(made: Installation) -> None:
    begun, done = acts(made, "apply")[:2]
    assert (begun["outcome"], done["outcome"]) == ("begun", "ok")
    assert "weather" in done["subject"]["views"]
    assert done["who"]["user"] == getpass.getuser()
    assert done["flow_run"] == "0f8b5f0e"
    assert done["project"] == "flights"


def test_a_materialization_says_its_window_of_each_view_and_the_registry_it_saw(
    made: Installation,
) -> None:
    done = [act for act in acts(made, "materialize") if act["outcome"] == "ok"]
    assert len({tuple(act["subject"]["views"]) for act in done}) == 7
    last = WINDOW.end - timedelta(microseconds=1)
    assert {act["window"]["end"] for act in done} == {last.isoformat()}
    assert all(act["registry_version"] for act in done)


def test_a_historical_read_says_views_and_counts_and_no_key_or_value(made: Installation) -> None:
    at = pd.Timestamp(WINDOW.start) + pd.Timedelta(hours=20)
    frame = pd.DataFrame({"origin": ["JFK", "EWR"], "event_timestamp": [at, at]})
    store = opened(made)
    store.get_historical_features(frame, ["weather:temp"]).to_df()
    query = f"SELECT 'JFK' AS origin, TIMESTAMPTZ '{at}' AS event_timestamp"
    store.get_historical_features(query, ["weather:temp"]).to_arrow()
    by_frame, by_query = acts(made, "historical-read")[-2:]
    assert (by_frame["entity_rows"], by_frame["rows"], by_frame["outcome"]) == (2, 2, "ok")
    assert len(by_query["query_sha256"]) == 64
    text = b"".join(line.text for line in AuditTrail(made.home / "audit").lines())
    assert b"JFK" not in text


def test_a_read_that_fails_is_told_as_one(made: Installation) -> None:
    job = opened(made).get_historical_features("SELECT 1 AS one", ["weather:temp"])
    with pytest.raises(FeatureStoreError):
        job.to_df()
    assert acts(made, "historical-read")[-1]["outcome"] == "failed: FeatureStoreError"


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """A store with a view that can be pushed to; nothing is online."""
    installation = Installation.at(tmp_path_factory.mktemp("gates"), num_days=1)
    repo = installation.repository.path
    (repo / "gates.py").write_text(GATES)
    store = open_store(installation.home, repo)
    apply_definitions(store, installation.home, repo)
    return store


def pushed_rows(**times: object) -> pd.DataFrame:
    usual: dict[str, object] = {"event_timestamp": WINDOW.start, "created": WINDOW.start}
    good, odd = usual, {**usual, **times}
    return pd.DataFrame([{"origin": "JFK", "temp": 51.0, **row} for row in (good, odd)])


def temp_online(store: FeatureStore) -> float | None:
    rows = [{"origin": "JFK"}]
    answer = store.get_online_features(["gate_weather:temp"], rows).to_dict()
    return answer["temp"][0]


@pytest.mark.parametrize("column", ["event_timestamp", "created"])
@pytest.mark.parametrize(
    ("moment", "wrong"),
    [
        (SOON, "reaches "),
        ("2099-01-01T00:00:00Z", r"reaches 2099-01-01"),
        (None, "has a null"),
        ("NaT", "has a null"),
        ("2013-01-01T06:00:00", "without a time zone"),
        ("yesterday evening", "is no time"),
    ],
)
def test_a_push_whose_times_cannot_be_is_refused_in_every_way_to_push(
    gates: FeatureStore, column: str, moment: object, wrong: str
) -> None:
    """The newer value wins, so one of 2099 would keep out all that come after it."""
    rows = pushed_rows(**{column: moment})
    if not isinstance(moment, datetime | None):
        rows[column] = [moment, moment]  # a column of texts or numbers, as HTTP brings it
    view = gates.get_feature_view("gate_weather")
    provider = gates._get_provider()
    ways = (
        lambda: gates.push("gates", rows),
        lambda: gates.write_to_online_store("gate_weather", rows),
        lambda: asyncio.run(gates.write_to_online_store_async("gate_weather", rows)),
        lambda: provider.ingest_df_to_offline_store(view, pa.Table.from_pandas(rows)),
    )
    for way in ways:
        with pytest.raises(WindowError, match=rf"gate_weather: column {column} .*{wrong}"):
            way()


def test_a_push_of_now_by_a_clock_a_little_ahead_can_be_read(gates: FeatureStore) -> None:
    now = datetime.now(UTC) + timedelta(minutes=2)
    gates.push("gates", pushed_rows(event_timestamp=now, created=now).tail(1))
    assert temp_online(gates) == pytest.approx(51.0)


def test_the_command_shows_the_trail_and_notices_a_removed_line(
    made: Installation, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--home", str(made.home), "audit"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "materialize     ok" in said
    assert f"{getpass.getuser()}: weather" in said
    assert "Complete" in said
    (file,) = (made.home / "audit").glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2] + lines[3:]))
    try:
        assert main([*arguments, "--verify"]) == 2
        assert "is not complete" in capsys.readouterr().err
        file.write_bytes(file.read_bytes() + b"\xff\nnull\n")
        for options, shown in (([], "is no audit line"), (["--json"], '"action":"materialize"')):
            assert main([*arguments, *options]) == 2
            said = capsys.readouterr()
            assert shown in said.out
            assert "is not complete" in said.err
    finally:
        file.write_bytes(b"".join(lines))
