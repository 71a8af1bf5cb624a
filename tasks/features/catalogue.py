"""The feature views of a use case, as its registry and its published tables describe them.

Nothing of the project is needed, and no value is read but the newest moment of each table.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from tasks.features.access.profile import import_feast
from tasks.features.offline.duck import parquet, sql_name
from tasks.features.tables.build import PUBLISHED, current_tables
from tasks.features.tables.ledger import load_ledger, read_json
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.settings import DEFAULT_PROFILE, Settings, bring, features_home_of

APPLIED = Path("feast") / "applied.json"
"""In a use case's folder: the project whose definitions were applied."""
QUERY = text("SELECT feature_view_proto FROM feature_views WHERE project_id = :project")


def catalogued_views(use_case: str, settings: Settings) -> list[dict[str, Any]]:
    """The views that were applied, by name, and how fresh they are; nothing is written.

    The registry is that of the built-in profiles. Moments are None where nothing was published, or
    put online; `handling`, the strictest class and all homes of the raw tables, is None too in
    tables of earlier releases.

    Raises:
        FeatureStoreError: the registry cannot be read.
        ArtifactError: what describes the published tables is gone or damaged.
    """
    import_feast()
    from feast.protos.feast.core.FeatureView_pb2 import FeatureView
    from feast.protos.feast.types.Value_pb2 import ValueType

    folder = features_home_of(settings.home, use_case)
    address = f"sqlite:///file:{quote(str(folder / 'feast' / 'registry.db'))}?mode=ro&uri=true"
    if settings.profile != DEFAULT_PROFILE:
        address = os.environ.get("FALAJ_REGISTRY_URL", address)
    project = {"project": read_json(bring(folder / APPLIED)).get("project")}
    try:
        with create_engine(address, poolclass=NullPool).connect() as connection:
            rows = connection.execute(QUERY, project).scalars().all()
    except SQLAlchemyError as exc:  # its text may hold a password
        raise FeatureStoreError(
            f"the registry of the feature views in {folder} cannot be read "
            f"({type(getattr(exc, 'orig', exc)).__name__}); expected the profile's own, whole. "
            "Refresh the features, or bring a backup with `falaj restore`. Nothing was changed"
        ) from exc
    tables, ledger = current_tables(folder, settings.store), load_ledger(folder)
    refs = {ref.name: ref.artifact for ref in tables.tables}
    online = {view.name: view.watermark for view in ledger.views} if ledger else {}
    found = []
    for spec in (FeatureView.FromString(row).spec for row in rows):
        source = spec.batch_source
        ref = refs.get(table := source.file_options.uri or source.name)
        path = settings.store.path(ref, verify=False) if ref else None
        described = {name: getattr(spec, name) for name in ("name", "description", "owner")}
        moments = {
            "newest_event": _newest(path, source.timestamp_field) if path else None,
            "published": _written(folder / PUBLISHED) if path else None,
            "online_until": online.get(spec.name),
        }
        entities = [name for name in spec.entities if not name.startswith("__")]
        features = {f.name: ValueType.Enum.Name(f.value_type).lower() for f in spec.features}
        facts = {"entities": entities, "features": features, "handling": tables.handling}
        sha256 = ref and ref.sha256
        found.append({**described, **facts, **moments, "table": table, "sha256": sha256})
    return sorted(found, key=lambda view: str(view["name"]))


def _newest(table: Path, column: str) -> datetime | None:
    """From the statistics of the files."""
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        query = f"SELECT max({sql_name(column)})::TIMESTAMPTZ FROM {parquet(table)}"
        moment = con.execute(query).fetchall()[0][0]
    return moment.astimezone(UTC) if moment else None


def _written(file: Path) -> datetime:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC)
