from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from tasks.contracts.base import TimeWindow
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.errors import DataContractError, WindowError
from tasks.kernel.settings import ArtifactStore
from tests.support.data.repository import SmallRepository, days


@pytest.fixture
def repository(tmp_path: Path) -> SmallRepository:
    return SmallRepository(tmp_path, num_days=3)


def land(
    repository: SmallRepository, store: ArtifactStore, first: int = 0, count: int = 3
) -> dict[str, int]:
    landed = land_raw_rows(days(first, count), repository.config, repository.path, store)
    return {table.name: table.num_rows for table in landed.tables}


def test_a_window_lands_its_rows_and_tables_without_history_whole(
    repository: SmallRepository, store: ArtifactStore
) -> None:
    on_second_day = (repository.read("flights")["day"] == "2").sum()
    assert land(repository, store, 1, 1) == {
        "flights": on_second_day,
        "weather": 72,
        "planes": 3322,
        "airports": 1458,
    }


def test_landed_rows_keep_how_they_are_to_be_treated(
    repository: SmallRepository, store: ArtifactStore
) -> None:
    declared = {"data_class": "personal", "home": ("uae",), "purposes": ("care",)}
    first, *others = repository.config.raw_tables
    tables = (first.model_copy(update=declared), *others)
    config = repository.config.model_copy(update={"raw_tables": tables, "purpose": "care"})
    landed = land_raw_rows(days(0, 1), config, repository.path, store)
    assert landed.handling == config.handling
    assert (landed.handling.data_class, landed.handling.homes) == ("personal", ("uae",))


@pytest.mark.parametrize(
    ("column", "value", "wanted"),
    [
        ("dep_delay", "soon", "whole number"),
        ("distance", "12.5", "whole number"),
        ("time_hour", "yesterday", "time with a time zone"),
        ("time_hour", "2013-01-01 10:00:00", "time with a time zone"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_an_example(
    repository: SmallRepository, store: ArtifactStore, column: str, value: str, wanted: str
) -> None:
    flights = repository.read("flights")
    flights.loc[[5, 7], column] = value
    repository.write("flights", flights)
    said = rf"{column} has 2 value\(s\) that are no {wanted}, such as '{value}'"
    with pytest.raises(DataContractError, match=said):
        land(repository, store)
    assert not list(store.root.glob("landed/*"))


def test_times_stored_without_a_zone_are_refused(
    repository: SmallRepository, store: ArtifactStore
) -> None:
    weather = repository.read("weather")
    naive = pd.to_datetime(weather["time_hour"]).dt.tz_localize(None)
    weather.assign(time_hour=naive).to_parquet(repository.path / "raw" / "weather.parquet")
    text = (repository.path / "use_case.yaml").read_text()
    (repository.path / "use_case.yaml").write_text(text.replace("weather.csv", "weather.parquet"))
    with pytest.raises(DataContractError, match=r"time_hour has .* no time with a time zone"):
        land(repository, store)


def test_a_window_of_a_mistyped_year_is_refused_before_anything_is_touched(
    repository: SmallRepository, store: ArtifactStore
) -> None:
    window = TimeWindow(start=datetime(1, 1, 1, tzinfo=UTC), end=days(0, 1).end)
    with pytest.raises(WindowError, match="longer than 100 years"):
        land_raw_rows(window, repository.config, repository.path, store)
    assert not store.root.exists()


def test_times_without_a_zone_get_the_one_that_is_declared(
    repository: SmallRepository, store: ArtifactStore
) -> None:
    weather = repository.read("weather")
    moments = pd.to_datetime(weather["time_hour"])
    local = moments.dt.tz_convert("America/New_York").dt.tz_localize(None)
    repository.write("weather", weather.assign(time_hour=local.astype(str)))
    zone = {"time_zone": "America/New_York"}
    raw = tuple(
        table.model_copy(update=zone) if table.name == "weather" else table
        for table in repository.config.raw_tables
    )
    config = repository.config.model_copy(update={"raw_tables": raw})
    landed = land_raw_rows(days(0, 3), config, repository.path, store)
    table = next(t for t in landed.tables if t.name == "weather")
    seen = pd.read_parquet(store.path(table.artifact))["time_hour"].dt.tz_convert("UTC")
    assert sorted(seen) == sorted(moments)
