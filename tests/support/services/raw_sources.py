"""The shop with its orders somewhere else than in one file."""

from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import LandedRows, SourceFile
from tasks.features.tables.landing import land_raw_rows
from tests.support.data.shop import Shop, orders

MONTHS = [f"2024-{month:02d}" for month in range(1, 7)]


def typed_orders() -> pd.DataFrame:
    """Orders whose times are moments."""
    return orders().assign(ordered=lambda rows: pd.to_datetime(rows["ordered"]))


def monthly(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Orders of each month."""
    return {month: rows[rows["ordered"].astype(str).str.startswith(month)] for month in MONTHS}


def month(number: int) -> TimeWindow:
    """One of six months, from 0."""
    edges = pd.date_range("2024-01-01", periods=7, freq="MS", tz="UTC")
    return TimeWindow(start=edges[number].to_pydatetime(), end=edges[number + 1].to_pydatetime())


class SourceShop(Shop):
    """Orders come from any uri; what landed of them is read back."""

    def source(self, uri: str, **more: Any) -> None:
        """Let orders come from elsewhere, maybe with more said of the table."""
        file = self.repo / "use_case.yaml"
        described = yaml.safe_load(file.read_text())
        described["features"]["raw_tables"][0] |= {"uri": uri, **more}
        file.write_text(yaml.safe_dump(described, sort_keys=False))

    def read(self, uri: str | None = None, window: TimeWindow | None = None) -> LandedRows:
        """Land a window, from another uri if one is given."""
        if uri:
            self.source(uri)
        config = self.config
        return land_raw_rows(window or config.window, config.features, self.repo, self.store)

    def rows(self, landed: LandedRows) -> pd.DataFrame:
        """Orders as they landed."""
        return pd.read_parquet(self.store.path(landed.tables[0].artifact))

    @property
    def folder(self) -> Path:
        """A folder for files of orders, made when it is first asked for."""
        folder = self.repo / "raw" / "orders"
        folder.mkdir(exist_ok=True)
        return folder


def seen(landed: LandedRows) -> SourceFile:
    """State in which the orders were read."""
    assert landed.tables[0].source
    return landed.tables[0].source
