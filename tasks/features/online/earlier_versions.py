"""Keep the values of earlier service versions fresh, for models that still read them.

A model reads the version that it was trained on until its successor is promoted, days after the
definitions changed. Feast materializes the newest version of a view alone.
"""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path

import pyarrow.parquet as pq
from feast import FeatureStore, FeatureView
from feast.feature_store import tqdm

from tasks.features.access.store import quiet
from tasks.features.access.versions import ServiceVersion, service_versions
from tasks.features.tables.evidence import pinned_views

logger = logging.getLogger(__name__)


def write_earlier_versions(
    feast: FeatureStore, start: datetime, last: datetime, num_versions: int
) -> tuple[str, ...]:
    """Write the views of each service's earlier versions that are not the newest of their view.

    Args:
        start: first event time that is written.
        last: last event time that is written.
        num_versions: so many versions of each service before its newest one.

    Returns:
        What was written, such as `weather@v0`. A version whose table has lost one of its columns
        cannot go on; it is left out with a warning, and its values age.
    """
    provider = feast._get_provider()
    written = []
    for view in earlier_views(feast, num_versions):
        name = f"{view.name}@v{view.current_version_number}"
        if lost := _lost_columns(feast, view):
            logger.warning(
                "%s is not written any further: its table %s has no column %s any more",
                name,
                view.batch_source.path,
                ", ".join(lost),
            )
            continue
        with quiet():
            # Its table may be gone with the whole online store; an apply makes the newest ones.
            provider.online_store.update(feast.config, [], [view], [], [], partial=True)
            provider.materialize_single_feature_view(
                feast.config,
                view,
                start,
                last,
                feast.registry,
                feast.project,
                lambda total: tqdm(total=total, disable=True),
            )
        written.append(name)
        logger.info("materialized %s for an earlier version of a service", name)
    return tuple(written)


def earlier_views(feast: FeatureStore, num_versions: int) -> list[FeatureView]:
    """Views as earlier versions of services read them, without those that are still the newest."""
    newest = {view.name: view.current_version_number or 0 for view in feast.list_feature_views()}
    found: dict[tuple[str, int], FeatureView] = {}
    for service in sorted({s.name for s in feast.list_feature_services()}):
        for version in _before_the_newest(service_versions(feast, service), num_versions):
            for view in pinned_views(feast, version):
                number = version.views[view.name]
                if view.online and number != newest.get(view.name):
                    found[view.name, number] = view
    return [found[key] for key in sorted(found)]


def _before_the_newest(versions: list[ServiceVersion], count: int) -> list[ServiceVersion]:
    return versions[:-1][-count:] if count else []


def _lost_columns(feast: FeatureStore, view: FeatureView) -> list[str]:
    """Columns that the view reads and its table no longer has."""
    source = view.batch_source
    files = sorted((Path(feast.config.offline_store.tables_path) / source.path).glob("*.parquet"))
    present = set(pq.read_schema(files[0]).names) if files else set()
    columns = {new: old for old, new in source.field_mapping.items()}
    read = [*(f.name for f in view.features), *(c.name for c in view.entity_columns)]
    times = [t for t in (source.timestamp_field, source.created_timestamp_column) if t]
    return sorted({*(columns.get(name, name) for name in read), *times} - present)
