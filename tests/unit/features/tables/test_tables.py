from pathlib import Path

import pandas as pd
import pytest

from tasks.contracts.data import FeatureTables
from tasks.features.tables.build import EMPTY, current_tables, publish_tables, published_path
from tasks.kernel.errors import ArtifactError, ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data.repository import SmallRepository, built, days, vouchers


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> SmallRepository:
    return SmallRepository(tmp_path_factory.mktemp("repository"), num_days=12)


def rows_of(tables: FeatureTables, name: str, store: ArtifactStore) -> pd.DataFrame:
    return pd.read_parquet(store.path(next(t for t in tables.tables if t.name == name).artifact))


@pytest.mark.slow
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_refreshing_in_parts_in_any_order_equals_refreshing_at_once(
    repository: SmallRepository, store: ArtifactStore, tmp_path: Path, order: list[int]
) -> None:
    other = ArtifactStore(tmp_path / "at-once")
    at_once = built(repository, other, days(0, 12))
    in_parts = EMPTY
    for part in order:
        in_parts = built(repository, store, days(4 * part, 4), in_parts)
    for name in ("carrier_stats", "plane_history"):
        left, right = rows_of(in_parts, name, store), rows_of(at_once, name, other)
        pd.testing.assert_frame_equal(left, right)
    assert in_parts.version == at_once.version


def test_refreshing_a_window_twice_changes_nothing(
    repository: SmallRepository, store: ArtifactStore
) -> None:
    once = built(repository, store, days(0, 6))
    builds = store.num_builds
    assert built(repository, store, days(0, 6), once) == once
    assert store.num_builds == builds


@pytest.mark.slow
def test_a_corrected_row_is_felt_in_later_windows_as_far_as_the_lookback(
    tmp_path: Path, store: ArtifactStore
) -> None:
    repository = SmallRepository(tmp_path, num_days=12)
    before = built(repository, store, days(6, 6), built(repository, store, days(0, 6)))
    flights = repository.read("flights")
    flights.loc[(flights["day"] == "6") & (flights["arr_delay"] != "NA"), "arr_delay"] = "200"
    repository.write("flights", flights)
    after = built(repository, store, days(0, 6), before)
    fresh = ArtifactStore(tmp_path / "fresh")
    at_once = built(repository, fresh, days(6, 6), built(repository, fresh, days(0, 6)))
    assert after.version == at_once.version != before.version


@pytest.mark.parametrize("content", ["{", "", '{"version": 1}', None])
def test_a_damaged_description_of_the_published_version_gets_a_sentence(
    tmp_path: Path, store: ArtifactStore, content: str | None
) -> None:
    folder = tmp_path / "artifacts" / "tables" / "k"
    (folder / "features").mkdir(parents=True)
    if content is not None:
        (folder / "value.json").write_text(content)
    (tmp_path / "feature_tables").mkdir()
    (tmp_path / "feature_tables" / "current").symlink_to(folder / "features")
    with pytest.raises(ArtifactError, match=r"value.json is (gone|damaged).*refresh all windows"):
        current_tables(tmp_path, store)


def test_readers_see_a_version_only_once_it_is_published_and_vouched_for(
    repository: SmallRepository, store: ArtifactStore, tmp_path: Path
) -> None:
    tables = built(repository, store, days(0, 2))
    assert current_tables(tmp_path, store) == EMPTY
    with pytest.raises(DataContractError, match=r"carrier_stats.* have no validation result"):
        publish_tables(tables, (), tmp_path, store)
    assert current_tables(tmp_path, store) == EMPTY
    publish_tables(tables, vouchers(tables.tables), tmp_path, store)
    assert current_tables(tmp_path, store) == tables
    assert (published_path(tmp_path) / "carrier_stats").is_dir()


@pytest.mark.parametrize(
    ("sql", "error", "said"),
    [
        ("SELECT nothing FROM flights", ConfigurationError, "weather.sql .* is wrong"),
        ("SELEKT 1", ConfigurationError, "weather.sql .* is wrong"),
        ("SELECT origin FROM weather", ConfigurationError, "no column created, event_timestamp"),
        (
            "SELECT origin, time_hour AS event_timestamp, time_hour AS created FROM weather "
            "UNION ALL SELECT origin, time_hour, time_hour FROM weather",
            DataContractError,
            "two rows at one moment",
        ),
        (
            "SELECT NULL::VARCHAR AS origin, now() AS event_timestamp, now() AS created",
            DataContractError,
            "null key",
        ),
        (
            "SELECT origin, time_hour + INTERVAL 10 YEARS AS event_timestamp, time_hour AS created "
            "FROM weather",
            DataContractError,
            "weather: .* event_timestamp at or after 2013-01-03T05:00Z, the newest 2023-01-03",
        ),
        (
            "SELECT origin, time_hour AS event_timestamp, now() + INTERVAL 2 DAYS AS created "
            "FROM weather",
            DataContractError,
            "weather: .* have a created that is more than 1 day",
        ),
    ],
)
def test_a_wrong_query_is_named_and_nothing_is_written(
    tmp_path: Path, store: ArtifactStore, sql: str, error: type[Exception], said: str
) -> None:
    repository = SmallRepository(tmp_path, num_days=2)
    (repository.path / "sql" / "weather.sql").write_text(sql)
    with pytest.raises(error, match=said):
        built(repository, store, days(0, 2))
    assert not list(store.root.glob("tables/*"))


def test_a_static_table_from_the_future_is_refused(tmp_path: Path, store: ArtifactStore) -> None:
    repository = SmallRepository(tmp_path, num_days=2)
    file = repository.path / "sql" / "planes.sql"
    ahead = "* REPLACE (now() + INTERVAL 1 HOUR AS event_timestamp)"
    file.write_text(f"SELECT {ahead} FROM ({file.read_text()})")
    with pytest.raises(DataContractError, match=r"planes: .* before now"):
        built(repository, store, days(0, 2))
