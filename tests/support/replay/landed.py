"""Landed rows of a small use case: three weather stations every hour, and sales now and then."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import LandedRows, TableRef
from tasks.features.config import FeatureConfig
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key

HISTORY = TimeWindow(start=datetime(2020, 2, 20, tzinfo=UTC), end=datetime(2020, 3, 20, tzinfo=UTC))
STATIONS = ("north", "south", "west")
CONFIG = FeatureConfig.model_validate(
    {
        "raw_tables": [
            {
                "name": "sales",
                "uri": "sales.parquet",
                "time_column": "sold",
                "key": ["sale"],
                "columns": {
                    "sale": "BIGINT", "sold": "TIMESTAMPTZ", "shop": "VARCHAR", "price": "DOUBLE",
                },
            },
            {
                "name": "readings",
                "uri": "readings.parquet",
                "time_column": "at",
                "key": ["station", "at"],
                "columns": {
                    "station": "VARCHAR", "at": "TIMESTAMPTZ", "hour": "BIGINT", "temp": "DOUBLE",
                    "clouds": "BIGINT", "sky": "VARCHAR",
                },
            },
            {
                "name": "shops",
                "uri": "shops.parquet",
                "key": ["shop"],
                "columns": {"shop": "VARCHAR", "size": "BIGINT"},
            },
        ],
        "feature_tables": [{"name": "levels", "from": "readings", "entity_keys": ["station"]}],
        "training_set": {"from": "sales", "label": "price > 5", "categorical": ["shop"]},
    }
)  # fmt: skip


def frames() -> dict[str, pd.DataFrame]:
    """Seeded rows of four weeks, with readings that are missing."""
    rng = np.random.default_rng(5)
    hours = pd.date_range(HISTORY.start, HISTORY.end, freq="h", inclusive="left")
    at = np.repeat(hours, len(STATIONS))
    temp = rng.normal(50, 10, len(at)).round(1)
    sold = HISTORY.start + pd.to_timedelta(np.sort(rng.uniform(0, 29 * 86_400, 500)), unit="s")
    return {
        "sales": pd.DataFrame(
            {
                "sale": np.arange(500),
                "sold": pd.Series(sold).astype("datetime64[us, UTC]"),
                "shop": rng.choice(["Ann", "Bob", None], 500, p=[0.6, 0.3, 0.1]),
                "price": rng.gamma(2, 3, 500),
            }
        ),
        "readings": pd.DataFrame(
            {
                "station": np.tile(STATIONS, len(hours)),
                "at": pd.Series(at).astype("datetime64[us, UTC]"),
                "hour": at.hour.astype(np.int64),
                "temp": np.where(rng.random(len(at)) < 0.02, np.nan, temp),
                "clouds": pd.array(rng.integers(0, 9, len(at)), dtype="Int64"),
                "sky": rng.choice(["Dry", "Wet"], len(at)),
            }
        ),
        "shops": pd.DataFrame({"shop": ["Ann", "Bob"], "size": [3, 4]}),
    }


def landed(store: ArtifactStore, rows: Mapping[str, pd.DataFrame] | None = None) -> LandedRows:
    """The rows as landing leaves them."""
    given = frames() if rows is None else rows

    def build(folder: StagedFolder) -> LandedRows:
        tables = []
        for name, frame in given.items():
            frame.to_parquet(folder.path / f"{name}.parquet", index=False)
            artifact = folder.artifact(f"{name}.parquet")
            tables.append(TableRef(name=name, artifact=artifact, num_rows=len(frame)))
        return LandedRows(window=HISTORY, tables=tuple(tables))

    key = content_key(*(frame.to_json() for frame in given.values()))
    return store.build_once("landed", key, LandedRows, build)


def after(hours: float) -> datetime:
    """A moment of the history."""
    return HISTORY.start + timedelta(hours=hours)
