"""Bad dates - in raw rows, in windows - never poison what is materialized."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest

from tasks.contracts.base import TimeWindow
from tasks.features.access.store import open_store
from tests.support.data.repository import SmallRepository, days
from tests.support.platform.loops import Loop, loop_repository
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

BAD_WINDOWS = {
    "reversed": (days(6, 1).end, days(3, 1).start),
    "empty": (days(3, 1).start, days(3, 1).start),
    "ends in the future": (days(3, 1).start, datetime.now(UTC) + timedelta(days=400)),
    "lies in the future": (datetime(2999, 1, 1, tzinfo=UTC), datetime(2999, 1, 2, tzinfo=UTC)),
}


def worded(text: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Rows of which one has this text as its time."""

    def spoil(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows.copy()
        rows.loc[rows.index[len(rows) // 2], "time_hour"] = text
        return rows

    return spoil


REFUSED_ROWS = {
    "no date": worded("yesterday"),
    "February 30": worded("2013-02-30T05:00:00Z"),
    "no time at all": worded(""),
}
OTHER_ROWS = {
    "the year one": worded("0001-01-01T00:00:00Z"),
    "the end of time": worded("9999-12-31T23:00:00Z"),
}
"""Rows of some other time are not of the window, so they are not landed, and move nothing."""


class Materialized:
    """What the registry and the online store say; equal where nothing was touched."""

    def __init__(self, loop: Loop) -> None:
        store = open_store(loop.home, loop.repository.path)
        self.intervals = {
            view.name: list(view.materialization_intervals) for view in store.list_feature_views()
        }
        with sqlite3.connect(f"file:{loop.home / 'feast' / 'online.db'}?mode=ro", uri=True) as file:
            names = [name for (name,) in file.execute("SELECT name FROM sqlite_master")]
            tables = [name for name in names if name.startswith("flights")]
            self.online = {
                name: file.execute(
                    f'SELECT entity_key, feature_name, value, event_ts FROM "{name}" ORDER BY 1, 2'
                ).fetchall()
                for name in tables
            }
        file.close()
        self.published = sorted(
            path.read_text() for path in (loop.home / "feature_tables").rglob("*.json")
        )
        self.ledger = (loop.home / "feast" / "materialized.json").read_text()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Materialized) and vars(self) == vars(other)


def refresh(loop: Loop, start: datetime, end: datetime) -> tuple[int, str]:
    return loop.run("features", "refresh", f"{start.isoformat()}", f"{end.isoformat()}")


def refuses(loop: Loop, start: datetime, end: datetime) -> None:
    """Refresh a window that must be refused."""
    before = Materialized(loop)
    code, said = refresh(loop, start, end)
    assert code == 2, said
    assert "Traceback" not in said
    assert Materialized(loop) == before, f"something was materialized; {said}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
@proves(Promise.BAD_DATE, "refused in a sentence; intervals, values as before; next refresh fine")
@proves(Promise.SENTENCE, "exit code 2 and a sentence for each bad window and row")
def test_bad_dates_leave_what_is_materialized_as_it_was_and_the_next_refresh_is_fine(
    tmp_path: Path,
) -> None:
    repository: SmallRepository = loop_repository(tmp_path)
    loop = Loop(tmp_path / "home", repository)
    code, said = refresh(loop, days(0, 3).start, days(0, 3).end)
    assert code == 0, said
    for window in BAD_WINDOWS.values():
        refuses(loop, *window)

    honest = repository.read("flights")
    times = pd.to_datetime(honest["time_hour"])
    window = days(3, 2)
    inside = honest[(times >= window.start) & (times < window.end)].index
    before = Materialized(loop)
    for name, spoil in (REFUSED_ROWS | OTHER_ROWS).items():
        rows = honest.copy()
        rows.loc[inside] = spoil(honest.loc[inside])
        repository.write("flights", rows)
        if name in REFUSED_ROWS:
            refuses(loop, window.start, window.end)
        else:
            num_landed = refresh_well(loop, before, window)
            assert num_landed == len(inside) - 1
    repository.write("flights", honest)
    assert refresh_well(loop, before, window) == len(inside)


def refresh_well(loop: Loop, before: Materialized, window: TimeWindow) -> int:
    """Refresh a window; nothing may be known beyond its end. Returns the flights that landed."""
    code, said = refresh(loop, window.start, window.end)
    assert code == 0, said
    after = Materialized(loop)
    for name, intervals in after.intervals.items():
        assert intervals[: len(before.intervals[name])] == before.intervals[name]
        assert all(start < end <= window.end for start, end in intervals), (name, intervals)
    assert after.online != before.online
    landed = re.search(r"landed ([\d,]+) rows of flights", said)
    assert landed, said
    return int(landed[1].replace(",", ""))
