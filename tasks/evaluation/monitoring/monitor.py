"""Monitor the feature tables of one window: keep statistics, judge them, tell alerts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import duckdb

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.data import (
    FeatureMonitoring,
    FeatureTables,
    MonitoredFeature,
    MonitoredPeriod,
    MonitoredView,
)
from tasks.evaluation.monitoring.alerts import FILE as ALERTS
from tasks.evaluation.monitoring.alerts import (
    AlertEvent,
    WindowDrift,
    append_alerts,
    drift_alerts,
    freshness_alerts,
    grouped,
    measure_drift,
    null_alerts,
    volume_alerts,
)
from tasks.evaluation.monitoring.config import MonitoringConfig
from tasks.evaluation.monitoring.history import FILE as HISTORY
from tasks.evaluation.monitoring.history import keep
from tasks.evaluation.monitoring.statistics import (
    DAY,
    MEMORY_LIMIT,
    FeatureDay,
    ViewDay,
    ViewTable,
    binned,
    feature_days,
    features_of,
    view_days,
)
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

MOST_PERIODS = 53
MOST_FEATURES = 12  # whose values the report shows over time
Day = TypeVar("Day")


@dataclass(frozen=True)
class _Seen:
    """Everything that was measured of one view."""

    view: str
    features: dict[str, bool]
    days: list[ViewDay]
    feature_days: list[FeatureDay]
    drift: list[WindowDrift]
    alerts: list[AlertEvent]


def monitor_tables(
    tables: FeatureTables,
    window: TimeWindow,
    view_keys: Mapping[str, Sequence[str]],
    config: MonitoringConfig,
    home: Path,
    store: ArtifactStore,
) -> FeatureMonitoring:
    """Statistics of each view by day, its drift, and the alerts that follow.

    Safe to repeat: statistics replace those of the same version, alerts are told once.

    Args:
        tables: the published version.
        window: whole days of it are monitored, counted from its start.
        view_keys: feature view with history to its entity keys.
        config: baseline and bounds.
        home: state folder, which keeps statistics and alerts.
        store: holds the tables.

    Raises:
        DataContractError: a table lacks its keys or times.
        StorageError: the history could not be written.
    """
    folders = {t.name: store.path(t.artifact, verify=False) for t in tables.tables}
    seen = []
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        con.execute("SET enable_progress_bar = false")
        con.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        for name, keys in view_keys.items():
            seen.append(_look(con, ViewTable(name, folders[name], tuple(keys)), window, config))
    kept = sum(keep(home, s.view, tables.version, s.days, s.feature_days) for s in seen)
    alerts = [alert for s in seen for alert in s.alerts]
    return FeatureMonitoring(
        window=window,
        baseline=config.baseline,
        tables_version=tables.version,
        num_statistics=kept,
        views=tuple(_view(s) for s in seen),
        features=tuple(_features(seen)),
        alerts=grouped(alerts),
        num_new_alerts=append_alerts(home, alerts),
        stale=grouped([alert for alert in alerts if alert.kind == "freshness"]),
    )


def _look(
    con: duckdb.DuckDBPyConnection, view: ViewTable, window: TimeWindow, config: MonitoringConfig
) -> _Seen:
    """Measure one view."""
    features = features_of(con, view)
    days = view_days(con, view, window)
    found = feature_days(con, view, features, window)
    drift: list[WindowDrift] = []
    alerts: list[AlertEvent] = []
    if config.baseline:
        # Before its first row a view was not there yet: such days are of no baseline.
        usual_days = [
            day for day in view_days(con, view, config.baseline) if math.isfinite(day.age_hours)
        ]
        if sum(day.num_rows > 0 for day in usual_days) >= 2 * config.window_days:
            usual = feature_days(con, view, features, config.baseline)
            drift = _drift(
                con, view, [f for f, number in features.items() if number], window, config
            )
            alerts = [
                *volume_alerts(view.name, usual_days, days, config),
                *freshness_alerts(view.name, usual_days, days, config),
                *null_alerts(view.name, usual, found, config),
                *drift_alerts(view.name, window, drift, config),
            ]
    return _Seen(view.name, features, days, found, drift, alerts)


def _drift(
    con: duckdb.DuckDBPyConnection,
    view: ViewTable,
    features: Sequence[str],
    window: TimeWindow,
    config: MonitoringConfig,
) -> list[WindowDrift]:
    """Drift of windows that end with the window, each a step before the next.

    A long window is walked in steps of whole windows, a short one day by day; the window before it
    is measured too, so that what goes on can be told from what begins.
    """
    assert config.baseline is not None
    num_days = math.floor((window.end - window.start) / DAY)
    step = config.window_days if num_days > config.window_days else 1
    ends = range(num_days, -step, -step)
    reach = timedelta(days=config.window_days + step)
    read = TimeWindow(start=window.start - reach, end=window.end)
    columns = binned(con, view, features, read, config.baseline)
    shift = reach // DAY  # days are counted from the start of what was read
    first = math.ceil((config.baseline.start - read.start) / DAY)
    after = math.floor((config.baseline.end - read.start) / DAY)
    found = measure_drift(columns, (first, after), [end + shift for end in reversed(ends)], config)
    return [
        WindowDrift(d.feature, d.end_day - shift, d.psi, d.ks, d.bound, d.drifted) for d in found
    ]


def _view(seen: _Seen) -> MonitoredView:
    newest = _newest(seen.drift)
    groups = _groups(seen.days)
    nulls: dict[object, list[float]] = {}
    for day in seen.feature_days:
        nulls.setdefault(day.start, []).append(day.null_rate)
    rates = [rate for found in nulls.values() for rate in found]
    lags = [day.lag_minutes for day in seen.days if math.isfinite(day.lag_minutes)]
    return MonitoredView(
        view=seen.view,
        num_rows=sum(day.num_rows for day in seen.days),
        num_features=len(seen.features),
        age_hours=_finite(seen.days[-1].age_hours) if seen.days else None,
        lag_minutes=sorted(lags)[len(lags) // 2] if lags else None,
        null_rate=_mean(rates) or 0.0,
        highest_psi=max((d.psi for d in newest), default=None),
        psi_bound=_finite(newest[0].bound) if newest else None,
        num_alerts=len(seen.alerts),
        periods=tuple(
            MonitoredPeriod(
                start=group[0].start,
                null_rate=_mean([r for d in group for r in nulls.get(d.start, [])]) or 0.0,
                num_rows=sum(d.num_rows for d in group),
            )
            for group in groups
        ),
        ages_hours=tuple(_finite(max(d.age_hours for d in group)) for group in groups),
    )


def _features(seen: Sequence[_Seen]) -> list[MonitoredFeature]:
    """Number features with the largest drift in the newest window, each with its values."""
    ranked = sorted(
        ((d, s) for s in seen for d in _newest(s.drift)), key=lambda pair: -pair[0].psi
    )[:MOST_FEATURES]
    return [
        MonitoredFeature(
            view=s.view,
            feature=d.feature,
            psi=d.psi,
            ks=d.ks,
            drifted=d.drifted,
            periods=tuple(
                _feature_period(group)
                for group in _groups([f for f in s.feature_days if f.feature == d.feature])
            ),
        )
        for d, s in ranked
    ]


def _feature_period(days: Sequence[FeatureDay]) -> MonitoredPeriod:
    return MonitoredPeriod(
        start=days[0].start,
        low=_mean([d.q05 for d in days]),
        median=_mean([d.median for d in days]),
        high=_mean([d.q95 for d in days]),
        null_rate=_mean([d.null_rate for d in days]) or 0.0,
        num_rows=sum(d.num_rows for d in days),
    )


def _newest(drift: Sequence[WindowDrift]) -> list[WindowDrift]:
    last = max((d.end_day for d in drift), default=0)
    return [d for d in drift if d.end_day == last]


def _groups(days: Sequence[Day]) -> list[Sequence[Day]]:
    """Days in at most `MOST_PERIODS` groups of equal length, the last may be shorter."""
    length = max(1, math.ceil(len(days) / MOST_PERIODS))
    return [days[start : start + length] for start in range(0, len(days), length)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class KeptMonitoring(Contract):
    """One monitoring result under its content key."""

    monitoring: FeatureMonitoring


def monitor_once(
    tables: FeatureTables,
    window: TimeWindow,
    view_keys: Mapping[str, Sequence[str]],
    config: MonitoringConfig,
    home: Path,
    store: ArtifactStore,
) -> FeatureMonitoring:
    """As `monitor_tables`, but measured only once while history and alerts are there.

    Raises:
        DataContractError: a table lacks its keys or times.
        StorageError: the history could not be written.
    """
    digests = [[table.name, table.artifact.sha256] for table in tables.tables]
    keys = {view: list(names) for view, names in view_keys.items()}
    key = content_key(code_digest(__file__), tables.version, digests, window, keys, config)
    if (home / HISTORY).exists() and (home / ALERTS).exists():
        kept = store.find("monitoring", key, KeptMonitoring)
        if kept:
            return kept.monitoring.model_copy(update={"num_new_alerts": 0})
    seen = monitor_tables(tables, window, view_keys, config, home, store)

    def build(folder: StagedFolder) -> KeptMonitoring:
        return KeptMonitoring(monitoring=seen)

    store.build_once("monitoring", key, KeptMonitoring, build)
    return seen
