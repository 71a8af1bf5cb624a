"""A small shop: a use case foreign to the repository, with files to be spoiled."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd

from flows.config import PipelineConfig, read_pipeline_config
from tasks.contracts.data import (
    ExcludedRows,
    FeatureSnapshot,
    FeatureTables,
    LandedRows,
    NumberSummary,
)
from tasks.features.entities import write_entities
from tasks.features.snapshot import build_training_set
from tasks.features.tables.build import EMPTY, build_feature_tables
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.settings import Settings
from tests.support.data.repository import vouched

SOURCE = Path(__file__).with_name("shop_use_case")


def customers() -> pd.DataFrame:
    """Forty customers of three towns, some of unknown age."""
    ages = [None if n % 9 == 0 else str(20 + n) for n in range(40)]
    towns = [("Nizwa", "Sur", "Ibri")[n % 3] for n in range(40)]
    return pd.DataFrame({"customer": [f"c{n:02d}" for n in range(40)], "town": towns, "age": ages})


def orders() -> pd.DataFrame:
    """600 orders of half a year; on about a third of all days there is none."""
    num_rows = 600
    rng = np.random.default_rng(3)
    open_days = np.flatnonzero(rng.random(182) < 0.65)
    seconds = np.sort(rng.choice(open_days, num_rows) * 86400 + rng.integers(0, 86400, num_rows))
    moments = pd.Timestamp("2024-01-01", tz="UTC") + pd.to_timedelta(seconds, unit="s")
    items = rng.integers(1, 6, num_rows)
    return pd.DataFrame(
        {
            "order_id": np.arange(num_rows),
            "customer": [f"c{n:02d}" for n in rng.integers(0, 40, num_rows)],
            "ordered": moments.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "items": items,
            "amount": np.round(items * rng.gamma(9, 2, num_rows), 2),
        }
    )


class Shop:
    """Feature repository of the shop in a folder of its own, and the first steps of a refresh."""

    def __init__(self, folder: Path) -> None:
        self.repo = folder / "shop"
        shutil.copytree(SOURCE, self.repo, ignore=shutil.ignore_patterns("__pycache__"))
        (self.repo / "raw").mkdir()
        self.settings = Settings(home=folder / "home", feature_repo=self.repo)
        self.store = self.settings.store
        self.write("orders", orders())
        self.write("customers", customers())

    @property
    def config(self) -> PipelineConfig:
        """What `use_case.yaml` says now."""
        return read_pipeline_config(self.repo)

    def write(self, table: str, rows: pd.DataFrame) -> None:
        """Replace the raw rows of a table."""
        rows.to_csv(self.repo / "raw" / f"{table}.csv", index=False)

    def replace(self, file: str, old: str, new: str) -> None:
        """Change a file of the repository; `old` must be in it."""
        text = (self.repo / file).read_text()
        assert old in text
        (self.repo / file).write_text(text.replace(old, new))

    def land(self) -> LandedRows:
        """Copy the rows of the whole window, typed."""
        config = self.config
        return land_raw_rows(config.window, config.features, self.repo, self.store)

    def tables(self) -> FeatureTables:
        """Compute the feature tables of the whole window."""
        features = self.config.features
        return build_feature_tables(vouched(self.land()), EMPTY, features, self.repo, self.store)

    def entities(self) -> tuple[tuple[ExcludedRows, ...], NumberSummary]:
        """Write the entity frame of the whole window."""
        config, tables = self.config, self.tables()
        target = self.store.root / "entities.parquet"
        return write_entities(tables, config.window, config.features, self.repo, self.store, target)

    def training_set(self) -> FeatureSnapshot:
        """Retrieve the training rows of the whole window with their features."""
        config = self.config
        return build_training_set(self.tables(), config.window, config.features, self.settings)
