"""Skew of served features: clean logs are clean, a store that was behind is found and named."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from feast import FeatureService

from tasks.features.access.guarded_store import GuardedFeatureStore
from tasks.features.access.store import find_service, open_store
from tasks.features.checks.serving_log import log_rows, log_schema
from tasks.features.checks.skew import compare_log
from tasks.features.config import OnlineConfig, SkewConfig, ViewPolicy
from tasks.features.online.reader import OnlineReader
from tasks.features.tables.build import features_folder
from tasks.kernel.errors import DataContractError
from tests.support.data.installation import Installation
from tests.support.data.repository import SmallRepository, days

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")]


@dataclass
class Serving:
    """Six days of tables, of which four are online, and the flights of the hours after those."""

    store: GuardedFeatureStore
    service: FeatureService
    flights: pd.DataFrame
    until: datetime

    def reader(self, **options: Any) -> OnlineReader:
        return OnlineReader(self.store, self.service, OnlineConfig(timeout_s=5, **options))

    def log(self, file: Path, now: datetime, reader: OnlineReader | None = None) -> Path:
        """Serve the flights at one moment, in two requests, and log them."""
        reader = reader or self.reader()
        parts = []
        for number, half in enumerate((self.flights[::2], self.flights[1::2])):
            keys: dict[str, Any] = {name: half[name].tolist() for name in half}
            parts.append(log_rows(reader.plan, f"r{number}", keys, reader.read(keys, now)))
        reader.close()
        pq.write_table(pa.concat_tables(parts), file)
        return file


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Serving:
    folder = tmp_path_factory.mktemp("skew")
    repository = SmallRepository(folder, num_days=6)
    installation = Installation(folder / "home", repository)
    tables = installation.refresh(days(0, 6))
    installation.materialize(tables, days(0, 4))
    store = open_store(
        installation.home, repository.path, features_folder(tables, installation.store)
    )
    flights = repository.read("flights")
    flights = flights[flights["day"] == "4"][["carrier", "origin", "dest", "tailnum"]]
    flights = flights[flights["tailnum"] != "NA"].drop_duplicates().head(150)
    service = find_service(store, "flight_delay_v1")
    return Serving(store, service, flights, days(0, 4).end)


def test_a_log_of_a_store_that_is_up_to_date_has_no_skew(serving: Serving, tmp_path: Path) -> None:
    """Minutes after the watermark all rows before it are known, and none after it."""
    log = serving.log(tmp_path / "log.parquet", serving.until + timedelta(minutes=4))
    report = compare_log(log, serving.store, serving.service)
    by_name = {feature.feature: feature for feature in report.features}
    # Rows of the full hour itself are known five minutes after it, so nothing newer is known yet.
    assert report.num_rows == 150
    assert report.verdict == "clean", report.evidence
    assert report.first == report.last == serving.until + timedelta(minutes=4)
    assert by_name["weather__temp"].mean_absolute_difference == 0
    assert len(report.features) == 69


def test_a_store_that_was_behind_is_found_and_named(serving: Serving, tmp_path: Path) -> None:
    """Ten hours without a materialization: hourly views expired, daily ones serve old values."""
    now = serving.until + timedelta(hours=10)
    log = serving.log(tmp_path / "log.parquet", now)
    report = compare_log(log, serving.store, serving.service)
    by_name = {feature.feature: feature for feature in report.features}
    assert report.verdict == "stale"
    weather = by_name["weather__temp"]
    assert weather.num_differing == weather.num_explained_by_age > 100
    assert weather.mean_absolute_difference is None, "all were blanked"
    assert all(feature.num_unexplained == 0 for feature in report.features)
    assert by_name["planes__seats"].num_differing == 0
    said = next(s for s in report.evidence if s.startswith("weather__temp"))
    assert "because the store was behind (mean age of view weather 11.0 h)" in said


def test_old_values_that_were_served_by_policy_are_explained_by_their_age(
    serving: Serving, tmp_path: Path
) -> None:
    now = serving.until + timedelta(hours=10)
    reader = serving.reader(policy=ViewPolicy(stale="serve"))
    log = serving.log(tmp_path / "log.parquet", now, reader)
    report = compare_log(log, serving.store, serving.service)
    weather = next(f for f in report.features if f.feature == "weather__temp")
    assert report.verdict == "stale", report.evidence
    assert weather.num_differing == weather.num_explained_by_age > 0
    assert weather.mean_absolute_difference is not None
    assert weather.mean_absolute_difference > 0


def test_values_that_training_would_not_have_known_yet_are_named(
    serving: Serving, tmp_path: Path
) -> None:
    """Half an hour before the watermark: the last hour's weather is online, an hour too early."""
    log = serving.log(tmp_path / "log.parquet", serving.until - timedelta(minutes=30))
    report = compare_log(log, serving.store, serving.service)
    weather = next(f for f in report.features if f.feature == "weather__temp")
    assert report.verdict == "early"
    assert weather.num_differing == weather.num_early > 0
    assert all(feature.num_unexplained == 0 for feature in report.features)
    said = next(s for s in report.evidence if s.startswith("weather__temp"))
    assert "because training would not have known them yet" in said


def test_values_that_no_moment_explains_are_skew(serving: Serving, tmp_path: Path) -> None:
    """Served in Celsius, trained in Fahrenheit."""
    file = serving.log(tmp_path / "log.parquet", serving.until + timedelta(minutes=4))
    rows = pq.read_table(file)
    celsius = pc.multiply(pc.subtract(rows["weather__temp"], 32.0), 5 / 9).cast(pa.float32())
    at = rows.column_names.index("weather__temp")
    pq.write_table(rows.set_column(at, rows.schema.field(at), celsius), file)
    report = compare_log(file, serving.store, serving.service)
    wrong = [f for f in report.features if f.num_differing]
    assert report.verdict == "skewed"
    assert [f.feature for f in wrong] == ["weather__temp"]
    assert wrong[0].num_unexplained == wrong[0].num_differing == 150
    assert wrong[0].differing_share == 1
    assert wrong[0].mean_absolute_difference is not None
    assert wrong[0].mean_absolute_difference > 1
    assert "150 without an explanation" in report.evidence[0]
    lenient = compare_log(file, serving.store, serving.service, SkewConfig(max_differing_share=1.0))
    assert lenient.verdict == "clean"


def test_entities_that_the_store_did_not_have_are_named(serving: Serving, tmp_path: Path) -> None:
    """The log says `missing` where retrieval has a value."""
    file = serving.log(tmp_path / "log.parquet", serving.until + timedelta(minutes=4))
    rows = pq.read_table(file)
    for at, column in enumerate(rows.schema):
        if column.name.startswith("plane_history__") or column.name == "age_s:plane_history":
            rows = rows.set_column(at, column, pa.nulls(rows.num_rows, column.type))
        if column.name == "state:plane_history":
            rows = rows.set_column(at, column, pa.array(["missing"] * rows.num_rows))
    pq.write_table(rows, file)
    report = compare_log(file, serving.store, serving.service)
    assert report.verdict == "stale"
    assert "because the store lacked the entity" in report.evidence[0]


def test_a_log_is_read_in_batches_with_the_same_result(serving: Serving, tmp_path: Path) -> None:
    log = serving.log(tmp_path / "log.parquet", serving.until + timedelta(hours=10))
    whole = compare_log(log, serving.store, serving.service)
    split = compare_log(log, serving.store, serving.service, SkewConfig(batch_rows=40))
    assert split.model_copy(update={"features": ()}) == whole.model_copy(update={"features": ()})
    for ours, theirs in zip(split.features, whole.features, strict=True):
        assert ours.num_differing == theirs.num_differing


@pytest.mark.parametrize("kind", ["absent", "folder", "file"])
def test_an_empty_log_has_a_report_without_rows(
    serving: Serving, tmp_path: Path, kind: str
) -> None:
    log = tmp_path / "log"
    if kind == "folder":
        log.mkdir()
    if kind == "file":
        pq.write_table(log_schema(serving.reader().plan).empty_table(), log)
    report = compare_log(log, serving.store, serving.service)
    assert (report.verdict, report.num_rows, report.first) == ("no rows", 0, None)


def test_a_log_without_a_column_or_that_is_no_log_is_refused(
    serving: Serving, tmp_path: Path
) -> None:
    file = serving.log(tmp_path / "log.parquet", serving.until)
    pq.write_table(pq.read_table(file).drop(["weather__temp", "age_s:weather"]), file)
    with pytest.raises(DataContractError, match=r"lacks column\(s\) weather__temp, age_s:weather"):
        compare_log(file, serving.store, serving.service)
    file.write_text("no parquet at all")
    with pytest.raises(DataContractError, match="cannot be read as a log of served features"):
        compare_log(file, serving.store, serving.service)
