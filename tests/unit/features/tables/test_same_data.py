"""Rows of other data are not merged into the published tables of a use case."""

from pathlib import Path

import pytest

from tasks.contracts.data import FeatureTables
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore
from tests.support.data.repository import SmallRepository, built, days


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[ArtifactStore, FeatureTables]:
    folder = tmp_path_factory.mktemp("published")
    store, repository = ArtifactStore(folder / "artifacts"), SmallRepository(folder, num_days=2)
    return store, built(repository, store, days(0, 2))


@pytest.fixture
def repository(tmp_path: Path) -> SmallRepository:
    return SmallRepository(tmp_path, num_days=2)


def test_a_file_with_other_keys_is_refused_unless_the_tables_are_adopted(
    published: tuple[ArtifactStore, FeatureTables], repository: SmallRepository
) -> None:
    store, base = published
    flights = repository.read("flights")
    flights["flight"] = (flights["flight"].astype(int) + 50_000).astype(str)
    repository.write("flights", flights)
    config = repository.config
    builds = store.num_builds
    with pytest.raises(
        ConfigurationError, match=r"raw table flights: of 1,\d+ .* 0 are in"
    ) as told:
        built(repository, store, days(0, 2), base)
    assert base.version[:12] in str(told.value)
    assert store.num_builds == builds + 1  # the landed rows
    adopting = config.model_copy(update={"adopts": base.version[:12]})
    assert built(repository, store, days(0, 2), base, adopting).version != base.version


def test_corrected_values_are_the_same_data(
    published: tuple[ArtifactStore, FeatureTables], repository: SmallRepository
) -> None:
    store, base = published
    flights = repository.read("flights")
    flights["distance"] = (flights["distance"].astype(int) + 1).astype(str)
    repository.write("flights", flights)
    assert built(repository, store, days(0, 2), base).version != base.version


@pytest.mark.parametrize(("old", "told"), [("rides", "none of the pub"), ("flights", "tailnum")])
def test_tables_of_other_names_or_columns_are_other_data(
    published: tuple[ArtifactStore, FeatureTables], repository: SmallRepository, old: str, told: str
) -> None:
    """Published: `rides` alone, or `flights` with the columns of the airports."""
    store, base = published
    airports = next(ref for ref in base.raw if ref.name == "airports")
    other = base.model_copy(update={"raw": (airports.model_copy(update={"name": old}),)})
    key = (*repository.config.raw_tables[0].key, "tailnum")
    flights = repository.config.raw_tables[0].model_copy(update={"key": key})
    tables = (flights, *repository.config.raw_tables[1:])
    config = repository.config.model_copy(update={"raw_tables": tables})
    with pytest.raises(ConfigurationError, match=told):
        built(repository, store, days(0, 2), other, config)
