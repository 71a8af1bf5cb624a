"""Alert events are appended once, whole, and read from where the reader stopped."""

import multiprocessing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from tasks.contracts.base import TimeWindow
from tasks.evaluation.monitoring.alerts import (
    FILE,
    AlertEvent,
    append_alerts,
    measure_drift,
    read_alerts,
)
from tasks.evaluation.monitoring.statistics import Binned


def event(day: int, value: float | None = 9.0) -> AlertEvent:
    start = datetime(2013, 3, 1, tzinfo=UTC) + timedelta(days=day)
    window = TimeWindow(start=start, end=start + timedelta(days=1))
    said = {"kind": "freshness", "view": "weather", "feature": None, "sentence": "too old"}
    return AlertEvent(**said, window=window, value=value, bound=4.0)


def test_an_event_is_appended_once_and_a_cut_off_line_does_no_harm(tmp_path: Path) -> None:
    assert append_alerts(tmp_path, [event(1), event(2), event(1)]) == 2
    with (tmp_path / FILE).open("a") as stream:
        stream.write('{"id": "cut')
    assert append_alerts(tmp_path, [event(2), event(3, value=None)]) == 1

    assert [(e.time.day, e.value) for e in read_alerts(tmp_path)] == [(3, 9.0), (4, 9.0), (5, None)]


def _write(folder: str) -> None:
    for day in range(20):
        append_alerts(Path(folder), [event(day)])


def test_writers_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(str(tmp_path),)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)

    events = read_alerts(tmp_path)

    assert len(events) == len({e.id for e in events}) == 20


def test_a_baseline_of_fewer_days_than_two_windows_judges_nothing() -> None:
    few = Binned("wind", np.array([0, 1, 2, 9]), np.array([[0.0, 9], [0, 9], [0, 9], [9, 0]]))
    found = measure_drift([few], (0, 3), [10], 7)
    assert [(drift.psi > 0, drift.drifted) for drift in found] == [(True, False)]
