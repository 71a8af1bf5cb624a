"""Monitor a version and window once: what was measured is kept in the artifact store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.data import FeatureMonitoring, FeatureTables
from tasks.evaluation.monitoring.alerts import FILE as ALERTS
from tasks.evaluation.monitoring.config import MonitoringConfig
from tasks.evaluation.monitoring.history import FILE as HISTORY
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key


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
    from tasks.evaluation.monitoring.monitor import (
        monitor_tables,  # brings DuckDB, a finished one needs none
    )

    seen = monitor_tables(tables, window, view_keys, config, home, store)

    def build(folder: StagedFolder) -> KeptMonitoring:
        return KeptMonitoring(monitoring=seen)

    store.build_once("monitoring", key, KeptMonitoring, build)
    return seen
