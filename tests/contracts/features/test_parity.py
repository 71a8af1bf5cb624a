"""Parity: what is online is what retrieval gives, and where it is not, the check finds it."""

import shutil
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tasks.features.checks.report import ParityReport
from tasks.features.tables.build import features_folder
from tasks.kernel.errors import ArtifactError, FeatureStoreError, TransientError
from tests.support.data.installation import Installation, Refreshed
from tests.support.data.repository import days

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Refreshed:
    """Six days in the tables, four of them online; to be copied, not used."""
    installation = Installation.at(tmp_path_factory.mktemp("pristine"), num_days=6)
    tables = installation.refresh(days(0, 6))
    installation.materialize(tables, days(0, 4))
    return installation, tables


@pytest.fixture
def refreshed(pristine: Refreshed, tmp_path: Path) -> Refreshed:
    """A copy to spoil."""
    installation, tables = pristine
    shutil.copytree(installation.home, tmp_path / "home", symlinks=True)
    return Installation(tmp_path / "home", installation.repository), tables


def file_of(refreshed: Refreshed, table: str) -> Path:
    installation, tables = refreshed
    (file,) = (features_folder(tables, installation.store) / table).glob("*.parquet")
    return file


def spoil_temperature(installation: Installation) -> int:
    """Make it 128 degrees in one place online; how many values that were."""
    with sqlite3.connect(installation.home / "feast" / "online.db") as connection:
        changed = connection.execute(
            "UPDATE flights_weather SET value = x'3500000043' "
            "WHERE feature_name = 'temp' AND instr(entity_key, CAST('JFK' AS BLOB)) > 0"
        ).rowcount
    connection.close()
    return changed


def of_view(report: ParityReport, name: str) -> Any:
    return next(view for view in report.views if view.view == name)


@pytest.mark.slow
def test_online_equals_offline_at_each_watermark_of_a_replay(refreshed: Refreshed) -> None:
    """The tables hold rows after the watermark each time: they must not count."""
    installation, tables = refreshed
    compared = []
    for last in (4, 5, 6):
        installation.materialize(tables, days(0, last))
        report = installation.parity(tables)
        assert report.result == "equal", report.evidence
        assert {view.watermark for view in report.views} == {days(0, last).end}
        assert sum(view.num_overtaken for view in report.views) == 0
        compared.append(sum(view.num_values for view in report.views))
    assert min(compared) > 2000
    assert of_view(report, "weather").num_entities == 3
    assert of_view(report, "plane_history").num_entities == 500


def test_a_spoilt_online_value_is_found_and_named(refreshed: Refreshed) -> None:
    installation, tables = refreshed
    assert spoil_temperature(installation) == 1
    report = installation.parity(tables)
    assert report.result == "different"
    assert sum(view.num_differing for view in report.views) == 1
    (example,) = report.examples
    assert (example.view, example.feature, example.entity) == ("weather", "temp", {"origin": "JFK"})
    assert example.online == "128.0"
    assert example.offline != "128.0"
    assert example.online_event_time == example.offline_event_time
    assert example.moment >= days(0, 4).end - timedelta(microseconds=1)
    assert report.evidence[0].startswith("1 of 27 values of 3 entities of feature view weather")
    assert "temp of origin JFK is 128.0 online" in report.evidence[0]


def test_an_entity_that_is_online_without_a_row_is_found(refreshed: Refreshed) -> None:
    """Its rows were taken back after they had been written online."""
    installation, tables = refreshed
    file = file_of(refreshed, "destination_stats")
    rows = pq.read_table(file)
    pq.write_table(rows.filter(pc.not_equal(rows["dest"], "IAH")), file)
    report = installation.parity(tables)
    assert of_view(report, "destination_stats").num_differing >= 10
    assert {e.entity["dest"] for e in report.examples} == {"IAH"}
    assert {e.offline for e in report.examples} == {None}
    assert {e.offline_event_time for e in report.examples} == {None}


def keep_weather(refreshed: Refreshed, age: timedelta, created_after: timedelta) -> None:
    """Let the weather feed end `age` before the watermark, its rows known `created_after`."""
    installation, tables = refreshed
    file = file_of(refreshed, "weather")
    rows = pq.read_table(file)
    rows = rows.filter(before(rows, days(0, 4).end - age))
    created = pc.add(rows["event_timestamp"], pa.scalar(created_after, pa.duration("us")))
    at = rows.column_names.index("created")
    rows = rows.set_column(at, "created", created.cast(rows["created"].type))
    pq.write_table(rows, file)
    shutil.rmtree(installation.home / "feast")
    installation.materialize(tables, days(0, 4))


@pytest.mark.slow
def test_a_spoilt_value_of_a_feed_that_ended_long_ago_is_found(refreshed: Refreshed) -> None:
    """At the watermark both sides are blank, whatever is stored."""
    installation, tables = refreshed
    keep_weather(refreshed, timedelta(hours=20), timedelta(hours=1))
    sound = installation.parity(tables)
    assert spoil_temperature(installation) == 1
    report = installation.parity(tables)
    weather = of_view(sound, "weather")
    assert sound.result == "equal", sound.evidence
    assert (weather.num_entities, weather.num_stale, weather.num_values) == (3, 3, 54)
    assert 27 <= weather.num_null < 54
    assert sound.evidence == ()
    (example,) = report.examples
    assert (example.feature, example.entity, example.online) == ("temp", {"origin": "JFK"}, "128.0")
    assert example.moment == example.offline_event_time + timedelta(hours=1)


def test_a_view_whose_rows_were_never_fresh_is_nothing_to_compare(refreshed: Refreshed) -> None:
    """Its rows became known only after their time to live had ended."""
    installation, tables = refreshed
    keep_weather(refreshed, timedelta(hours=40), timedelta(hours=30))
    report = installation.parity(tables)
    weather = of_view(report, "weather")
    assert report.result == "equal"
    assert (weather.num_entities, weather.num_stale) == (3, 3)
    assert weather.num_values == weather.num_null == 27
    (sentence,) = report.evidence
    assert sentence.startswith("nothing to compare: all 27 values of 3 entities of feature view")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        ("gone", "feature table weather is not there; there are carrier_stats"),
        ("cut short", "source weather_table at weather cannot be read .*a file is damaged"),
    ],
)
def test_a_table_that_is_damaged_or_gone_is_named(
    refreshed: Refreshed, harm: str, sentence: str
) -> None:
    installation, tables = refreshed
    file = file_of(refreshed, "weather")
    if harm == "gone":
        shutil.rmtree(file.parent)
    else:
        file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises((ArtifactError, FeatureStoreError), match=sentence) as refusal:
        installation.parity(tables)
    assert "SELECT" not in str(refusal.value)
    assert "free space" not in str(refusal.value)


def before(rows: pa.Table, moment: Any) -> Any:
    return pc.less(rows["event_timestamp"], pa.scalar(moment, rows["event_timestamp"].type))


def test_a_row_that_came_late_is_counted_as_overtaken_not_as_different(
    refreshed: Refreshed,
) -> None:
    """The newest row before the watermark became known only after a newer one."""
    installation, tables = refreshed
    file = file_of(refreshed, "weather")
    rows = pq.read_table(file)
    last = pc.max(pc.filter(rows["event_timestamp"], before(rows, days(0, 4).end)))
    late = pc.and_(pc.equal(rows["event_timestamp"], last), pc.equal(rows["origin"], "LGA"))
    created = pc.if_else(late, pa.scalar(days(0, 6).end, rows["created"].type), rows["created"])
    pq.write_table(rows.set_column(rows.column_names.index("created"), "created", created), file)
    report = installation.parity(tables)
    weather = of_view(report, "weather")
    assert (weather.num_entities, weather.num_overtaken) == (2, 1)
    assert report.result == "equal"


def test_tables_that_are_not_the_ones_online_are_refused(refreshed: Refreshed) -> None:
    installation, tables = refreshed
    other = tables.model_copy(update={"version": "f" * 32})
    with pytest.raises(TransientError, match=f"holds {tables.version[:12]}, .* ffffffffffff"):
        installation.parity(other)
    (installation.home / "feast" / "materialized.json").unlink()
    with pytest.raises(FeatureStoreError, match="run the feature refresh"):
        installation.parity(tables)
