"""Prefect task of the monitoring room."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureMonitoring, FeatureTables
from tasks.evaluation.monitoring.config import MonitoringConfig
from tasks.kernel.retry_policy import RETRIED
from tasks.kernel.settings import Settings


@task(
    name="monitor-features",
    task_run_name="monitor-features-{window.slug}",
    **RETRIED,
    timeout_seconds=600,
    cache_policy=NO_CACHE,
)
def monitor_features(
    tables: FeatureTables,
    window: TimeWindow,
    view_keys: dict[str, tuple[str, ...]],
    config: MonitoringConfig,
) -> FeatureMonitoring:
    """Keep statistics of the published features, and report what left the baseline.

    Safe to retry: what was measured of a version and window is kept, an alert is raised once.

    Raises:
        DataContractError: a table lacks its keys or times. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.evaluation.monitoring.monitor import monitor_tables

    settings = Settings.from_environment()
    seen = monitor_tables(tables, window, view_keys, config, settings.features_home, settings.store)
    create_table_artifact(
        key="feature-monitoring",
        table=[
            {
                "view": view.view,
                "rows": view.num_rows,
                "age at the end, h": view.age_hours,
                "lag, min": view.lag_minutes,
                "nulls": round(view.null_rate, 4),
                "highest PSI": view.highest_psi,
                "PSI bound": view.psi_bound,
                "alerts": view.num_alerts,
            }
            for view in seen.views
        ],
        description=f"Features of {window}, tables {tables.version[:12]}",
    )
    lines = [f"- {sentence}" for sentence in seen.alerts] or ["Nothing left the baseline."]
    heading = f"## {seen.num_alerts} alerts of {seen.window}, {seen.num_new_alerts} new"
    create_markdown_artifact(key="feature-alerts", markdown="\n".join([heading, "", *lines]))
    return seen
