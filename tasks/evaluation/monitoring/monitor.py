"""Monitor the feature tables of one window: keep statistics, judge them, raise alerts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import duckdb
import pandas as pd

from tasks.contracts.base import Artifact, Contract, TimeWindow
from tasks.contracts.data import (
    FeatureMonitoring,
    FeatureTables,
    MonitoredFeature,
    MonitoredPeriod,
    MonitoredView,
)
from tasks.evaluation.monitoring.alerts import (
    AlertEvent,
    WindowDrift,
    append_alerts,
    day_alerts,
    drift_alerts,
    grouped,
    measure_drift,
    null_alerts,
)
from tasks.evaluation.monitoring.config import MonitoringConfig
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
VIEW_DAYS, FEATURE_DAYS = "view_days.parquet", "feature_days.parquet"


class KeptMonitoring(Contract):
    """One monitoring result under its content key, beside the statistics by day as Parquet."""

    monitoring: FeatureMonitoring
    view_days: Artifact
    feature_days: Artifact


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
    """Statistics of each view by day, its drift, and the alerts that follow; measured once.

    Safe to repeat: what was measured of a version and window is kept, an alert is raised once.

    Args:
        tables: the published version.
        window: whole days of it are monitored, counted from its start.
        view_keys: feature view with history to its entity keys.
        config: the baseline.
        home: state folder, which keeps the alerts.
        store: holds the tables, and takes the statistics.

    Raises:
        DataContractError: a table lacks its keys or times.
        StorageError: the disk refused a write.
    """
    digests = [[table.name, table.artifact.sha256] for table in tables.tables]
    keys = {view: list(names) for view, names in view_keys.items()}
    key = content_key(code_digest(__file__), tables.version, digests, window, keys, config)
    if kept := store.find("monitoring", key, KeptMonitoring):
        return kept.monitoring.model_copy(update={"num_new_alerts": 0})

    def build(folder: StagedFolder) -> KeptMonitoring:
        folders = {t.name: store.path(t.artifact, verify=False) for t in tables.tables}
        views = [ViewTable(name, folders[name], tuple(names)) for name, names in keys.items()]
        seen = _measure(views, window, config)
        for name, days in (
            (VIEW_DAYS, [(s.view, day) for s in seen for day in s.days]),
            (FEATURE_DAYS, [(s.view, day) for s in seen for day in s.feature_days]),
        ):
            rows = pd.DataFrame([{"view": view, **vars(day)} for view, day in days])
            rows.to_parquet(folder.path / name, index=False)
        return KeptMonitoring(
            monitoring=_summary(seen, tables.version, window, config, home),
            view_days=folder.artifact(VIEW_DAYS),
            feature_days=folder.artifact(FEATURE_DAYS),
        )

    return store.build_once("monitoring", key, KeptMonitoring, build).monitoring


def _measure(
    views: Sequence[ViewTable], window: TimeWindow, config: MonitoringConfig
) -> list[_Seen]:
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        con.execute("SET enable_progress_bar = false")
        con.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        return [_measure_view(con, view, window, config) for view in views]


def _summary(
    seen: Sequence[_Seen], version: str, window: TimeWindow, config: MonitoringConfig, home: Path
) -> FeatureMonitoring:
    alerts = [alert for s in seen for alert in s.alerts]
    return FeatureMonitoring(
        window=window,
        baseline=config.baseline,
        tables_version=version,
        num_statistics=sum(len(s.days) + len(s.feature_days) for s in seen),
        views=tuple(_view(s) for s in seen),
        features=tuple(_features(seen)),
        alerts=grouped(alerts),
        num_new_alerts=append_alerts(home, alerts),
        stale=grouped([alert for alert in alerts if alert.kind == "freshness"]),
    )


def _measure_view(
    con: duckdb.DuckDBPyConnection, view: ViewTable, window: TimeWindow, config: MonitoringConfig
) -> _Seen:
    features = features_of(con, view)
    days = view_days(con, view, window)
    found = feature_days(con, view, features, window)
    seen = _Seen(view.name, features, days, found, [], [])
    baseline = config.baseline
    if baseline is None:
        return seen
    # Before its first row a view was not there yet: such days are of no baseline.
    usual_days = [day for day in view_days(con, view, baseline) if math.isfinite(day.age_hours)]
    if sum(day.num_rows > 0 for day in usual_days) >= 2 * config.window_days:
        usual = feature_days(con, view, features, baseline)
        numbers = [name for name, is_number in features.items() if is_number]
        seen.drift.extend(_drift(con, view, numbers, window, baseline, config.window_days))
        seen.alerts.extend(day_alerts(view.name, usual_days, days))
        seen.alerts.extend(null_alerts(view.name, usual, found))
        seen.alerts.extend(drift_alerts(view.name, window.start, seen.drift, config.window_days))
    return seen


def _drift(
    con: duckdb.DuckDBPyConnection,
    view: ViewTable,
    features: Sequence[str],
    window: TimeWindow,
    baseline: TimeWindow,
    length: int,
) -> list[WindowDrift]:
    """Drift of windows that end with the window, each a step before the next.

    A long window is walked in steps of whole windows, a short one day by day; the window before it
    is measured too, so that what goes on can be told from what begins.
    """
    num_days = math.floor((window.end - window.start) / DAY)
    step = length if num_days > length else 1
    read = TimeWindow(start=window.start - timedelta(days=length + step), end=window.end)
    columns = binned(con, view, features, read, baseline, window.start)
    first, after = (
        round_((bound - window.start) / DAY)
        for round_, bound in ((math.ceil, baseline.start), (math.floor, baseline.end))
    )
    ends = range(num_days, -step, -step)
    return measure_drift(columns, (first, after), list(reversed(ends)), length)


def _view(seen: _Seen) -> MonitoredView:
    newest = _newest(seen.drift)
    lags = sorted(day.lag_minutes for day in seen.days if math.isfinite(day.lag_minutes))
    return MonitoredView(
        view=seen.view,
        num_rows=sum(day.num_rows for day in seen.days),
        num_features=len(seen.features),
        age_hours=_finite(seen.days[-1].age_hours) if seen.days else None,
        lag_minutes=lags[len(lags) // 2] if lags else None,
        null_rate=_mean([day.null_rate for day in seen.feature_days]) or 0.0,
        highest_psi=max((d.psi for d in newest), default=None),
        psi_bound=_finite(newest[0].bound) if newest else None,
        num_alerts=len(seen.alerts),
    )


def _features(seen: Sequence[_Seen]) -> list[MonitoredFeature]:
    """Number features with the largest drift in the newest window, each with its values."""
    newest = [(d, s) for s in seen for d in _newest(s.drift)]
    return [
        MonitoredFeature(
            view=s.view,
            feature=d.feature,
            psi=d.psi,
            ks=d.ks,
            drifted=d.drifted,
            periods=tuple(
                MonitoredPeriod(
                    start=days[0].start,
                    low=_mean([day.q05 for day in days]),
                    median=_mean([day.median for day in days]),
                    high=_mean([day.q95 for day in days]),
                    null_rate=_mean([day.null_rate for day in days]) or 0.0,
                    num_rows=sum(day.num_rows for day in days),
                )
                for days in _groups([f for f in s.feature_days if f.feature == d.feature])
            ),
        )
        for d, s in sorted(newest, key=lambda pair: -pair[0].psi)[:MOST_FEATURES]
    ]


def _newest(drift: Sequence[WindowDrift]) -> list[WindowDrift]:
    last = max((d.end_day for d in drift), default=0)
    return [d for d in drift if d.end_day == last]


def _groups(days: Sequence[FeatureDay]) -> list[Sequence[FeatureDay]]:
    """Days in at most `MOST_PERIODS` groups of equal length, the last may be shorter."""
    length = max(1, math.ceil(len(days) / MOST_PERIODS))
    return [days[start : start + length] for start in range(0, len(days), length)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
