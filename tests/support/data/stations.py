"""Ten weeks of six weather stations, for the monitoring of features."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables, TableRef
from tasks.evaluation.config import MonitoringConfig
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key

START = datetime(2013, 1, 1, 5, tzinfo=UTC)
BASELINE = TimeWindow(start=START, end=START + timedelta(days=42))
LATER = TimeWindow(start=BASELINE.end, end=BASELINE.end + timedelta(days=28))
CONFIG = MonitoringConfig(baseline=BASELINE)
KEYS = {"stations": ("station",)}
Change = Callable[[pd.DataFrame], pd.DataFrame]


def rows() -> pd.DataFrame:
    """Ten weeks of six stations, hourly: a normal, a mostly-zero, a text feature."""
    rng = np.random.default_rng(7)
    hours = pd.date_range(START, LATER.end, freq="h", inclusive="left")
    times = np.repeat(hours, 6)
    size = len(times)
    moments = pd.Series(times).astype("datetime64[us, UTC]")
    return pd.DataFrame(
        {
            "station": np.tile([f"s{n}" for n in range(6)], len(hours)),
            "event_timestamp": moments,
            "created": moments + timedelta(minutes=5),
            "level": rng.normal(50, 10, size).astype(np.float32),
            "rain": np.where(rng.random(size) < 0.9, 0, rng.gamma(2, 1, size)).astype(np.float32),
            "state": rng.choice(["dry", "wet"], size),
        }
    )


def tables(store: ArtifactStore, change: Change = lambda data: data) -> FeatureTables:
    data = change(rows())

    def build(folder: StagedFolder) -> FeatureTables:
        (folder.path / "stations").mkdir()
        data.to_parquet(folder.path / "stations" / "201301.parquet", index=False)
        table = TableRef(name="stations", artifact=folder.artifact("stations"), num_rows=len(data))
        return FeatureTables(version="a" * 32, raw=(), tables=(table,), sources={})

    return store.build_once("tables", content_key(data.to_json()), FeatureTables, build)


def after(day: int) -> datetime:
    return LATER.start + timedelta(days=day)
