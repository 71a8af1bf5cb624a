"""Queries keep to what they declare: features to known rows, entities to their window."""

from pathlib import Path

import pytest

from tasks.features.config import FeatureConfig
from tasks.features.entities import write_entities
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data.repository import SmallRepository, built, days

ALL_OF_THE_PAST = """
SELECT origin, time_hour AS event_timestamp, time_hour + INTERVAL 1 HOUR AS created,
    count(*) OVER (PARTITION BY origin ORDER BY time_hour)::FLOAT AS temp
FROM weather WHERE time_hour < getvariable('window_end')
QUALIFY time_hour >= getvariable('window_start')
"""
LATE_ROWS = """
SELECT origin, time_hour + INTERVAL 3 HOURS AS event_timestamp, time_hour + INTERVAL 4 HOURS
    AS created, temp::FLOAT AS temp
FROM weather WHERE time_hour + INTERVAL 3 HOURS >= getvariable('window_start')
AND time_hour + INTERVAL 3 HOURS < getvariable('window_end')
"""
MEAN_OF_ALL_TIME = """
SELECT origin, time_hour AS event_timestamp, time_hour + INTERVAL 1 HOUR AS created,
    avg(temp) OVER (PARTITION BY origin)::FLOAT AS temp
FROM weather
QUALIFY time_hour >= getvariable('window_start') AND time_hour < getvariable('window_end')
"""
STATIC_MEAN = """
SELECT origin, TIMESTAMPTZ '2013-01-01 00:00Z' AS event_timestamp,
    TIMESTAMPTZ '2013-01-01 00:00Z' AS created, avg(temp)::FLOAT AS temp
FROM weather GROUP BY origin
"""
NEXT_HOUR = """
SELECT origin, time_hour - INTERVAL 1 HOUR AS event_timestamp, time_hour AS created,
    temp::FLOAT AS temp
FROM weather WHERE time_hour - INTERVAL 1 HOUR >= getvariable('window_start')
AND time_hour - INTERVAL 1 HOUR < getvariable('window_end')
"""
UPPER = "  AND scheduled_departure - INTERVAL 2 HOURS < getvariable('window_end')"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> SmallRepository:
    return SmallRepository(tmp_path_factory.mktemp("repository"), num_days=3)


def weather_alone(
    repository: SmallRepository, sql: str, lookback_hours: int, **changes: object
) -> FeatureConfig:
    """A configuration whose only feature table is the weather, by this query."""
    (repository.path / "sql" / "weather.sql").write_text(sql)
    (weather,) = (t for t in repository.config.feature_tables if t.name == "weather")
    changed = weather.model_copy(update={"lookback_hours": lookback_hours, **changes})
    return repository.config.model_copy(update={"feature_tables": (changed,)})


@pytest.mark.parametrize(
    ("sql", "lookback_hours", "seen"),
    [(ALL_OF_THE_PAST, 1, "temp differs in"), (LATE_ROWS, 2, "on one side only")],
)
def test_a_lookback_that_is_too_short_for_its_query_is_refused_with_what_was_seen(
    repository: SmallRepository, store: ArtifactStore, sql: str, lookback_hours: int, seen: str
) -> None:
    config = weather_alone(repository, sql, lookback_hours)
    with pytest.raises(
        ConfigurationError, match=f"weather: lookback_hours: {lookback_hours}.*{seen}"
    ):
        built(repository, store, days(0, 3), config=config)
    assert not list(store.root.glob("tables/*"))


@pytest.mark.parametrize(("sql", "lookback_hours"), [(ALL_OF_THE_PAST, 72), (LATE_ROWS, 3)])
def test_a_lookback_that_holds_all_that_is_read_passes(
    repository: SmallRepository, store: ArtifactStore, sql: str, lookback_hours: int
) -> None:
    config = weather_alone(repository, sql, lookback_hours)
    assert built(repository, store, days(0, 3), config=config).tables[0].num_rows > 0


@pytest.mark.parametrize(
    ("sql", "changes"), [(MEAN_OF_ALL_TIME, {}), (STATIC_MEAN, {"static": True}), (NEXT_HOUR, {})]
)
def test_a_feature_that_knows_later_rows_is_refused_with_what_was_seen(
    repository: SmallRepository, store: ArtifactStore, sql: str, changes: dict[str, object]
) -> None:
    config = weather_alone(repository, sql, 100, **changes)
    with pytest.raises(
        ConfigurationError, match=r"dated after the moment.* (temp differs|on one side)"
    ):
        built(repository, store, days(0, 3), config=config)
    assert not list(store.root.glob("tables/*"))


def test_rows_that_are_known_ahead_are_declared(
    repository: SmallRepository, store: ArtifactStore
) -> None:
    config = weather_alone(repository, NEXT_HOUR, 0, known_ahead_hours=1)
    assert built(repository, store, days(0, 3), config=config).tables[0].num_rows > 0


def test_entities_that_heed_only_one_end_of_their_window_are_refused(
    repository: SmallRepository, tmp_path: Path
) -> None:
    """All rows lie in the window of training: only a narrower one shows it."""
    store = ArtifactStore(tmp_path)
    config = weather_alone(repository, LATE_ROWS, 3)
    tables = built(repository, store, days(0, 3), config=config)
    window, file = days(-1, 5), repository.path / config.training_set.sql
    target, text = tmp_path / "entities.parquet", file.read_text()
    write_entities(tables, window, config, repository.path, store, target)
    assert UPPER in text
    file.write_text(text.replace(UPPER, ""))
    with pytest.raises(DataContractError, match=r"gives 0 rows before and \d+ after"):
        write_entities(tables, window, config, repository.path, store, target)
