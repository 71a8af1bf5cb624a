"""Profile `cluster` with the state on S3: Spark's tables, training sets and online values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from tasks.features.online.materialization import materialize
from tasks.features.snapshot import build_training_set
from tasks.features.tables.build import EMPTY
from tasks.kernel.location import Location
from tasks.kernel.settings import ArtifactStore, Settings
from tests.support.data.installation import Installation
from tests.support.data.profiles import Servers, choose_server, choose_spark
from tests.support.data.repository import built, days
from tests.support.state import become

pytest.importorskip("pyspark", reason="it is not in the lock: make test-cluster")
pytestmark = [
    pytest.mark.timeout(1200),  # a minute on two free cores
    pytest.mark.filterwarnings("ignore::DeprecationWarning:feast"),
    pytest.mark.filterwarnings("ignore:The spark:RuntimeWarning"),  # Feast calls it experimental
]
TWO_MONTHS = days(29, 2)
"""The last hours are in February."""


@dataclass
class Machine(Installation):
    """An installation with a disk of its own, whose state is in a location."""

    location: Location

    @property
    def settings(self) -> Settings:
        return Settings(self.home, self.repository.path, location=self.location)

    @property
    def store(self) -> ArtifactStore:
        return self.settings.store


def test_tables_and_training_set_made_by_spark_on_s3_are_those_of_duckdb_on_a_disk(
    running: Servers, lake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Installation.at(tmp_path / "local", num_days=31)
    tables = local.refresh(TWO_MONTHS)
    expected = local.snapshot(tables, TWO_MONTHS)

    choose_spark(monkeypatch, tmp_path)
    choose_server(monkeypatch, running, running.new_database())
    monkeypatch.setenv("FALAJ_PROFILE", "cluster")
    become(monkeypatch, tmp_path / "one", lake)
    one = Machine(tmp_path / "one", local.repository, Location.of(lake))
    on_spark = built(one.repository, one.store, TWO_MONTHS, EMPTY)
    assert on_spark.version == tables.version
    assert [ref.num_rows for ref in on_spark.tables] == [ref.num_rows for ref in tables.tables]
    snapshot = build_training_set(on_spark, TWO_MONTHS, one.repository.config, one.settings)
    pd.testing.assert_frame_equal(one.rows(snapshot), local.rows(expected))
    assert snapshot.class_shares == expected.class_shares
    assert not one.location.entries("computed")
    assert sum(view.num_entities for view in materialize(on_spark, TWO_MONTHS, one.settings)) > 1000

    # Another machine finds what the first has made, and computes nothing.
    become(monkeypatch, tmp_path / "two", lake)
    two = Machine(tmp_path / "two", local.repository, Location.of(lake))
    assert built(two.repository, two.store, TWO_MONTHS, EMPTY) == on_spark
    pd.testing.assert_frame_equal(two.rows(snapshot), local.rows(expected))
