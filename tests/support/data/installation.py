"""A state folder with a small feature repository, and what one does with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureSnapshot, FeatureTables
from tasks.features.access.store import GuardedFeatureStore, apply_definitions, open_store
from tasks.features.checks.parity import check_parity
from tasks.features.checks.report import ParityReport
from tasks.features.config import MaterializationConfig
from tasks.features.online.materialization import materialize
from tasks.features.snapshot import build_training_set
from tasks.features.tables.build import EMPTY, features_folder, publish_tables
from tasks.governance.journal import Journal
from tasks.kernel.settings import ArtifactStore, Settings
from tests.support.data.repository import SmallRepository, built, vouchers
from tests.support.state import acts

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
    def settings(self) -> Settings:
        return Settings(home=self.home, feature_repo=self.repository.path)

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.home / "artifacts")

    @property
    def trail(self) -> Journal:
        return Journal(self.home / "audit")

    def acts(self, action: str) -> list[dict[str, Any]]:
        """The audit lines of one kind of act."""
        return acts(self.home, action)

    def open(self, tables: FeatureTables | None = None) -> GuardedFeatureStore:
        """The feature store on the published tables, or on these."""
        folder = features_folder(tables, self.store) if tables else None
        return open_store(self.home, self.repository.path, folder)

    def apply(self, tables: FeatureTables | None = None) -> GuardedFeatureStore:
        """Apply the definitions; the store as whoever opens it next sees it."""
        apply_definitions(self.open(tables))
        return self.open(tables)

    def online(self, feature: str, **key: str) -> Any:
        """What a new reader gets of one entity."""
        return self.open().get_online_features([feature], [key]).to_dict()[feature.split(":")[1]][0]

    def refresh(self, window: TimeWindow, base: FeatureTables = EMPTY) -> FeatureTables:
        return built(self.repository, self.store, window, base)

    def materialize(
        self, tables: FeatureTables, window: TimeWindow, **settings: Any
    ) -> dict[str, int]:
        views = materialize(tables, window, self.settings, MaterializationConfig(**settings))
        return {view.name: view.num_entities for view in views}

    def parity(self, tables: FeatureTables) -> ParityReport:
        return check_parity(tables, self.repository.config, self.settings)

    def publish(self, tables: FeatureTables) -> None:
        """Vouch for every table and let readers see this version."""
        publish_tables(tables, vouchers(tables.tables), self.home, self.store)

    def snapshot(self, tables: FeatureTables, window: TimeWindow) -> FeatureSnapshot:
        return build_training_set(tables, window, self.repository.config, self.settings)

    def rows(self, snapshot: FeatureSnapshot) -> pd.DataFrame:
        return pd.read_parquet(self.store.path(snapshot.data))


Refreshed = tuple[Installation, FeatureTables]
"""An installation and the newest version of its tables."""
