"""A refresh for training that is refused leaves all that readers see as it was."""

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from flows.config import PipelineConfig, read_pipeline_config
from flows.feature_refresh import feature_refresh_flow
from tasks.features.access.store import open_store
from tasks.features.tables.build import current_tables
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, Settings
from tests.support.data.repository import SmallRepository
from tests.support.platform.loops import loop_repository

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SERVICE = "flight_delay_v1"


@pytest.fixture
def repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_prefect: None
) -> Iterator[SmallRepository]:
    repository = loop_repository(tmp_path)
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(repository.path))
    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: str(tmp_path / "results")}):
        yield repository


def config_of(repository: SmallRepository) -> PipelineConfig:
    return read_pipeline_config(repository.path)


def seen_by_readers(repository: SmallRepository) -> tuple[object, ...]:
    """Published tables, every value online, the ledger, and which service readers get."""
    home = Settings.from_environment().features_home
    online = {}
    with sqlite3.connect(home / "feast" / "online.db") as con:
        for (name,) in con.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            if rows := con.execute(f'SELECT * FROM "{name}"').fetchall():
                online[name] = sorted(rows, key=repr)
    service = open_store(home, repository.path).get_feature_service(SERVICE).tags
    ledger = (home / "feast" / "materialized.json").read_text()
    return current_tables(home, ArtifactStore(home / "artifacts")).version, online, ledger, service


def change(file: Path, pattern: str, replacement: str) -> str:
    before = file.read_text()
    after = re.sub(pattern, replacement, before)
    assert after != before
    file.write_text(after)
    return before


def drop_flights(repository: SmallRepository) -> None:
    """Other raw rows, so that a refresh has something to publish."""
    flights = repository.read("flights")
    dropped = (flights["day"] == "30") & flights["flight"].str.endswith("7")
    repository.write("flights", flights[~dropped])


def planes_of(repository: SmallRepository) -> set[str]:
    return set(repository.read("flights")["tailnum"].dropna())


def test_a_refused_training_set_leaves_tables_and_online_values_as_they_were(
    repository: SmallRepository,
) -> None:
    config = config_of(repository)
    first = feature_refresh_flow(config.window, config)
    before, planes = seen_by_readers(repository), planes_of(repository)
    drop_flights(repository)
    entities = repository.path / "sql" / "entities.sql"
    definitions = repository.path / "definitions.py"
    text = change(entities, r"\(arr_delay > 15\)::TINYINT", "NULL::TINYINT")
    described = change(definitions, r"ttl=timedelta\(hours=6\)", "ttl=timedelta(hours=5)")

    with pytest.raises(DataContractError, match="has a label"):
        feature_refresh_flow(config.window, config)

    assert seen_by_readers(repository) == before
    entities.write_text(text)
    definitions.write_text(described)
    mended = feature_refresh_flow(config.window, config)
    assert mended.tables.version != first.tables.version
    written = {view.name: view.num_entities for view in mended.views}
    expected = {view.name: view.num_entities for view in first.views}
    expected["plane_history"] -= len(planes - planes_of(repository))
    assert written == expected
