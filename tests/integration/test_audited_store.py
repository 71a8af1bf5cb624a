"""What the SDK does with the feature store is in the audit; Feast's own tools read the profiles."""

from __future__ import annotations

import getpass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from feast import FeatureStore
from feast.infra.registry.sql import SqlRegistry
from feast.repo_config import load_repo_config

from flows.__main__ import main
from tasks.errors import FeatureStoreError, WindowError
from tasks.features.audit import AuditTrail, on_behalf_of
from tasks.features.store import open_store
from tasks.features.tables import features_folder
from tests.installation import Installation
from tests.repository import SmallRepository, days

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
WINDOW = days(0, 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """One day, applied and materialized on behalf of a flow run."""
    repository = SmallRepository(tmp_path_factory.mktemp("repository"), num_days=1)
    installation = Installation(tmp_path_factory.mktemp("state") / "home", repository)
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


@pytest.mark.parametrize("end", ["2113-01-01", "2012-12-31"])
def test_a_window_that_cannot_be_is_refused_by_the_provider_too(
    made: Installation, end: str
) -> None:
    until = pd.Timestamp(end, tz="UTC").to_pydatetime()
    with pytest.raises((WindowError, ValueError)):
        opened(made).materialize(WINDOW.start, until, feature_views=["weather"])


def test_the_command_shows_the_trail_and_notices_a_removed_line(
    made: Installation, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--home", str(made.home), "audit"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "materialize     ok" in said
    assert f"{getpass.getuser()}: weather, 20" in said
    assert "Whole" in said
    (file,) = (made.home / "audit").glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2] + lines[3:]))
    try:
        assert main([*arguments, "--verify"]) == 2
        assert "is not whole" in capsys.readouterr().err
    finally:
        file.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "name", ["feature_store.yaml", "profiles/file.yaml", "profiles/server.yaml"]
)
def test_feasts_command_line_reads_each_profile_as_we_do(
    made: Installation, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(made.home))
    monkeypatch.setenv("FALAJ_REDIS", "127.0.0.1:6379")
    monkeypatch.setenv("FALAJ_REGISTRY_URL", "postgresql+psycopg://127.0.0.1/feast")
    repo = made.repository.path
    config = load_repo_config(repo, repo / name)
    assert config.project == "flights"
    assert config.audit["path"] == str(made.home / "audit")
    if name == "feature_store.yaml":
        registry = FeatureStore(config=config).registry
        assert isinstance(registry, SqlRegistry)
        assert len(registry.list_feature_views("flights")) == 7
