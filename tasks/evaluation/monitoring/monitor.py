"""Monitor the feature tables of one window: keep statistics, judge them, raise alerts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd

from tasks.contracts import data
from tasks.contracts.base import Artifact, Contract, TimeWindow
from tasks.evaluation.config import MonitoringConfig
from tasks.evaluation.monitoring import alerts as alerting
from tasks.evaluation.monitoring.statistics import DAY, ViewTable
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

MOST_PERIODS = 53
MOST_FEATURES = 12  # whose values the report shows over time
VIEW_DAYS, FEATURE_DAYS = "view_days.parquet", "feature_days.parquet"
SETTINGS = "SET TimeZone = 'UTC'; SET enable_progress_bar = false; SET memory_limit = '2GB'"


class KeptMonitoring(Contract):
    """One monitoring result under its content key, beside the statistics by day as Parquet."""

    monitoring: data.FeatureMonitoring
    view_days: Artifact
    feature_days: Artifact


@dataclass(frozen=True)
class _Seen:
    """Everything that was measured of one view."""

    table: ViewTable
    days: pd.DataFrame
    feature_days: pd.DataFrame
    drift: list[alerting.WindowDrift]
    alerts: list[alerting.AlertEvent]

    @property
    def newest(self) -> list[alerting.WindowDrift]:
        """Drift in the newest window."""
        last = max((d.end_day for d in self.drift), default=0)
        return [d for d in self.drift if d.end_day == last]


def monitor_tables(
    tables: data.FeatureTables,
    window: TimeWindow,
    view_keys: Mapping[str, Sequence[str]],
    config: MonitoringConfig,
    home: Path,
    store: ArtifactStore,
) -> data.FeatureMonitoring:
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
        seen = _measured(tables, window, view_keys, config, store)
        for name, frames in (
            (VIEW_DAYS, [s.days.assign(view=s.table.name) for s in seen]),
            (FEATURE_DAYS, [s.feature_days.assign(view=s.table.name) for s in seen]),
        ):
            rows = pd.concat(frames) if frames else pd.DataFrame()
            rows.to_parquet(folder.path / name, index=False)
        return KeptMonitoring(
            monitoring=_summary(seen, tables.version, window, config, home),
            view_days=folder.artifact(VIEW_DAYS),
            feature_days=folder.artifact(FEATURE_DAYS),
        )

    return store.build_once("monitoring", key, KeptMonitoring, build).monitoring


def find_alerts(
    tables: data.FeatureTables,
    window: TimeWindow,
    view_keys: Mapping[str, Sequence[str]],
    config: MonitoringConfig,
    store: ArtifactStore,
) -> tuple[alerting.AlertEvent, ...]:
    """What monitoring each day of a stretch would raise, in order of time; nothing is kept.

    Args:
        tables: any version.
        window: whole days of it; drift is looked for on each, however many they are.
        view_keys: feature view with history to its entity keys.
        config: the baseline.
        store: holds the tables.
    """
    seen = _measured(tables, window, view_keys, config, store, daily=True)
    return tuple(sorted((a for s in seen for a in s.alerts), key=lambda a: (a.time, a.id)))


def _measured(
    tables: data.FeatureTables,
    window: TimeWindow,
    view_keys: Mapping[str, Sequence[str]],
    config: MonitoringConfig,
    store: ArtifactStore,
    *,
    daily: bool = False,
) -> list[_Seen]:
    folders = {t.name: store.path(t.artifact, verify=False) for t in tables.tables}
    with duckdb.connect() as con:
        con.execute(SETTINGS)
        return [
            _measure(ViewTable(con, name, folders[name], names), window, config, daily=daily)
            for name, names in view_keys.items()
        ]


def _measure(
    table: ViewTable, window: TimeWindow, config: MonitoringConfig, *, daily: bool
) -> _Seen:
    days, features = table.days(window), table.feature_days(window)
    seen = _Seen(table, days, features, [], [])
    baseline, length = config.baseline, config.window_days
    if baseline is None:
        return seen
    usual = table.days(baseline)
    usual = usual[np.isfinite(usual["age_hours"])]  # days before the first row are of no baseline
    if (usual["num_rows"] > 0).sum() >= 2 * length:
        seen.drift.extend(_drift(table, window, baseline, length, daily=daily))
        seen.alerts.extend(alerting.day_alerts(table.name, usual, days))
        ages = (
            table.entity_ages(each, baseline, alerting.MIN_ENTITY_SHARE)
            for each in (baseline, window)
        )
        seen.alerts.extend(alerting.entity_alerts(table.name, *ages))
        seen.alerts.extend(alerting.null_alerts(table.name, table.feature_days(baseline), features))
        seen.alerts.extend(alerting.drift_alerts(table.name, window.start, seen.drift, length))
    return seen


def _drift(
    table: ViewTable, window: TimeWindow, baseline: TimeWindow, length: int, *, daily: bool
) -> list[alerting.WindowDrift]:
    """Drift of windows that end with the window, each a step before the next.

    A long window is walked in steps of whole windows, a short one day by day; the window before it
    is measured too, so that what goes on can be told from what begins.
    """
    num_days = (window.end - window.start) // DAY
    step = length if num_days > length and not daily else 1
    read = TimeWindow(start=window.start - (length + step) * DAY, end=window.end)
    first = math.ceil((baseline.start - window.start) / DAY)
    after = math.floor((baseline.end - window.start) / DAY)
    ends = range(num_days, -step, -step)
    return alerting.measure_drift(
        table.binned(read, baseline, window.start), (first, after), ends[::-1], length
    )


def _summary(
    seen: Sequence[_Seen], version: str, window: TimeWindow, config: MonitoringConfig, home: Path
) -> data.FeatureMonitoring:
    alerts = [alert for s in seen for alert in s.alerts]
    newest = [(d, s) for s in seen for d in s.newest]
    return data.FeatureMonitoring(
        window=window,
        baseline=config.baseline,
        tables_version=version,
        num_statistics=sum(len(s.days) + len(s.feature_days) for s in seen),
        views=tuple(_view(s) for s in seen),
        features=tuple(
            _feature(d, s) for d, s in sorted(newest, key=lambda pair: -pair[0].psi)[:MOST_FEATURES]
        ),
        alerts=alerting.grouped(alerts),
        num_new_alerts=alerting.append_alerts(home, alerts),
        stale=alerting.grouped([alert for alert in alerts if alert.kind == "freshness"]),
    )


def _view(seen: _Seen) -> data.MonitoredView:
    newest, days = seen.newest, seen.days
    return data.MonitoredView(
        view=seen.table.name,
        num_rows=int(days["num_rows"].sum()),
        num_features=len(seen.table.features),
        age_hours=_finite(days["age_hours"].iloc[-1]) if len(days) else None,
        lag_minutes=_finite(days["lag_minutes"].quantile(interpolation="higher")),
        null_rate=_finite(seen.feature_days["null_rate"].mean()) or 0.0,
        highest_psi=max((d.psi for d in newest), default=None),
        psi_bound=_finite(newest[0].bound) if newest else None,
        num_alerts=len(seen.alerts),
    )


def _feature(drift: alerting.WindowDrift, seen: _Seen) -> data.MonitoredFeature:
    """A number with its values, in at most `MOST_PERIODS` groups of days of equal length."""
    days = seen.feature_days[seen.feature_days["feature"] == drift.feature]
    length = max(1, math.ceil(len(days) / MOST_PERIODS))
    groups = [days[start : start + length] for start in range(0, len(days), length)]
    return data.MonitoredFeature(
        view=seen.table.name,
        feature=drift.feature,
        psi=drift.psi,
        ks=drift.ks,
        drifted=drift.drifted,
        periods=tuple(
            data.MonitoredPeriod(
                start=group["start"].iloc[0],
                low=_finite(group["q05"].mean()),
                median=_finite(group["median"].mean()),
                high=_finite(group["q95"].mean()),
                null_rate=group["null_rate"].mean(),
                num_rows=int(group["num_rows"].sum()),
            )
            for group in groups
        ),
    )


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
