"""What a materialization reaches, what it refuses, and when it believes that it is done."""

import sqlite3
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import MaterializedView
from tasks.features.online.sqlite_store import NewerWinsSqliteOnlineStore
from tasks.features.tables import ledger as ledgers
from tasks.kernel.errors import FeatureStoreError, WindowError
from tests.support.data.installation import Installation, Refreshed
from tests.support.data.repository import days
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")


def beside(three_days: Refreshed, folder: Path) -> Refreshed:
    """Another state folder with the same artifacts, of which nothing is online."""
    source, tables = three_days
    installation = Installation(folder / "home", source.repository)
    installation.home.mkdir()
    (installation.home / "artifacts").symlink_to(source.home / "artifacts")
    return installation, tables


def ledger_of(home: Path) -> ledgers.Ledger:
    ledger = ledgers.load_ledger(home)
    assert ledger
    return ledger


@pytest.mark.parametrize("lateness_hours", [24, 0])
def test_rows_that_arrive_late_are_written_within_the_overlap(
    tmp_path: Path, lateness_hours: float
) -> None:
    """The weather of the second day comes after that day was materialized; the third has none.

    It came with a window that was never materialized, so without an overlap it arrives too.
    """
    installation = Installation.at(tmp_path, num_days=3)
    weather = installation.repository.read("weather")
    times = pd.to_datetime(weather["time_hour"], utc=True)
    installation.repository.write("weather", weather[times < days(1, 1).start])
    tables = installation.refresh(days(0, 2))
    installation.materialize(tables, days(0, 2))
    before = installation.online("weather:temp", origin="JFK")
    installation.repository.write("weather", weather[times < days(2, 1).start])
    tables = installation.refresh(days(1, 2), tables)
    installation.materialize(tables, days(2, 1), lateness_hours=lateness_hours)
    late = weather[(times < days(2, 1).start) & (weather["origin"] == "JFK")]
    newest = float(late.iloc[-1]["temp"])
    assert newest != pytest.approx(before)
    assert installation.online("weather:temp", origin="JFK") == pytest.approx(newest, rel=1e-6)


@proves(Promise.BAD_DATE, "a sentence; nothing touched")
@pytest.mark.parametrize(
    ("hours", "sentence"),
    [(0, "empty or reversed"), (-24, "empty or reversed"), (10**6, "ends in the future")],
)
def test_a_window_that_cannot_be_is_refused_before_anything_is_touched(
    three_days: Refreshed, tmp_path: Path, hours: int, sentence: str
) -> None:
    installation = Installation(tmp_path / "home", three_days[0].repository)
    start = days(0, 1).start
    unchecked = TimeWindow.model_construct(start=start, end=start + timedelta(hours=hours))
    with pytest.raises(WindowError, match=sentence):
        installation.materialize(three_days[1], unchecked)
    assert not installation.home.exists()


def test_the_watermark_stays_where_entities_are_missing_after_the_write(
    three_days: Refreshed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation, tables = beside(three_days, tmp_path)
    monkeypatch.setattr(NewerWinsSqliteOnlineStore, "count_entities", lambda *_: 1)
    with pytest.raises(FeatureStoreError, match=r"1 are online, expected .* watermark was not"):
        installation.materialize(tables, days(0, 3))
    assert ledgers.load_ledger(installation.home) is None


def test_of_two_that_end_at_the_same_time_the_later_watermark_stays(
    three_days: Refreshed, tmp_path: Path
) -> None:
    installation, tables = three_days
    repo = installation.repository.path
    late, early = days(0, 3).end, days(0, 1).end
    for watermark in (late, early):
        view = MaterializedView(name="weather", watermark=watermark, num_entities=3)
        ledgers.write_ledger(tables, repo, (view,), tmp_path, token=5)
    assert ledger_of(tmp_path).views[0].watermark == late
    view = MaterializedView(name="weather", watermark=early, num_entities=3)
    ledgers.write_ledger(tables, repo, (view,), tmp_path, token=6)
    assert ledger_of(tmp_path).views[0].watermark == early


@pytest.fixture
def online(three_days: Refreshed, tmp_path: Path) -> Refreshed:
    """Three days online, in a folder of its own."""
    installation, tables = beside(three_days, tmp_path)
    installation.materialize(tables, days(0, 3))
    return installation, tables


def values_online(installation: Installation) -> list[tuple[object, ...]]:
    with sqlite3.connect(installation.home / "feast" / "online.db") as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return [
            (name, *row)
            for (name,) in sorted(names.fetchall())
            for row in connection.execute(
                f'SELECT entity_key, feature_name, value, event_ts FROM "{name}" ORDER BY 1, 2'
            )
        ]


def test_a_lost_ledger_does_not_move_the_watermark_back(online: Refreshed) -> None:
    """The store bears a token, so it was filled; it may hold all that ever landed."""
    installation, tables = online
    before = values_online(installation)
    token = ledger_of(installation.home).token
    (installation.home / "feast" / "materialized.json").unlink()
    installation.materialize(tables, days(0, 1))
    assert values_online(installation) == before
    ledger = ledger_of(installation.home)
    assert {view.watermark for view in ledger.views} == {days(0, 3).end}
    assert ledger.token == token


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"\xff\xfe",
        lambda _: b"[1, 2]",
        lambda whole: whole[:-9],
        lambda whole: whole.replace(b'"views"', b'"seen"'),
        lambda whole: whole.replace(b'Z"', b'"'),  # a moment without a time zone
    ],
)
def test_a_damaged_ledger_counts_as_absent(
    three_days: Refreshed, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    installation, tables = three_days
    repo = installation.repository.path
    view = MaterializedView(name="weather", watermark=days(0, 3).end, num_entities=3)
    ledgers.write_ledger(tables, repo, (view,), tmp_path, token=5)
    file = tmp_path / "feast" / "materialized.json"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"token"', b'"mark"'))  # as an earlier version wrote it
    assert ledger_of(tmp_path).token == 5
    file.write_bytes(damage(whole))
    assert ledgers.load_ledger(tmp_path) is None
    assert ledgers.online_views(tables, days(0, 1), tmp_path, repo) is None
    ledgers.write_ledger(tables, repo, (view,), tmp_path, token=5)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("name", ["a%41b", "what?", "no#1", "two words"])
def test_a_store_is_found_marked_whatever_its_folder_is_called(
    three_days: Refreshed, tmp_path: Path, name: str
) -> None:
    repository = three_days[0].repository
    home = tmp_path / name
    (home / "feast").mkdir(parents=True)
    ledgers.write_token(home, repository.path, 7)
    assert ledgers.read_token(home, repository.path) == 7
