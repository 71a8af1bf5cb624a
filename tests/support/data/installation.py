"""A state folder with a small feature repository, and what one does with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureSnapshot, FeatureTables
from tasks.features.online.materialization import materialize
from tasks.features.snapshot import build_training_set
from tasks.features.tables.build import EMPTY, publish_tables
from tasks.kernel.settings import ArtifactStore
from tests.support.data.repository import SmallRepository, built, vouchers

GATES = """
from datetime import timedelta

from definitions import floats, origin, weather_table
from feast import FeatureView, PushSource

gate_weather = FeatureView(
    name="gate_weather",
    entities=[origin],
    ttl=timedelta(hours=6),
    schema=floats("temp"),
    source=PushSource(name="gates", batch_source=weather_table),
)
"""
"""Definitions of a view that can be pushed to."""


@dataclass
class Installation:
    """A state folder with a small feature repository."""

    home: Path
    repository: SmallRepository

    @classmethod
    def at(cls, folder: Path, num_days: int) -> Installation:
        return cls(folder / "home", SmallRepository(folder, num_days))

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.home / "artifacts")

    def refresh(self, window: TimeWindow, base: FeatureTables = EMPTY) -> FeatureTables:
        return built(self.repository, self.store, window, base)

    def materialize(self, tables: FeatureTables, window: TimeWindow) -> dict[str, int]:
        views = materialize(tables, window, self.home, self.repository.path, self.store)
        return {view.name: view.num_entities for view in views}

    def publish(self, tables: FeatureTables) -> None:
        """Vouch for every table and let readers see this version."""
        publish_tables(tables, vouchers(tables.tables), self.home, self.store)

    def snapshot(self, tables: FeatureTables, window: TimeWindow) -> FeatureSnapshot:
        config, path = self.repository.config, self.repository.path
        return build_training_set(tables, window, config, self.home, path, self.store)

    def rows(self, snapshot: FeatureSnapshot) -> pd.DataFrame:
        return pd.read_parquet(self.store.path(snapshot.data))
