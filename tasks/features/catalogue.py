"""The feature views of a use case, as its registry and its published tables describe them.

Nothing of the project is needed, and no value is read but the newest moment of each table.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from tasks.features.access.profile import import_feast
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

    from tasks.features.tables.evidence import latest

    folder = features_home_of(settings.home, use_case)
    address = f"sqlite:///file:{quote(str(folder / 'feast' / 'registry.db'))}?mode=ro&uri=true"
    shared = settings.profile != DEFAULT_PROFILE and os.environ.get("FALAJ_REGISTRY_URL")
    project = {"project": read_json(bring(folder / APPLIED)).get("project")}
    try:
        with create_engine(shared or address, poolclass=NullPool).connect() as connection:
            rows = connection.execute(QUERY, project).scalars().all()
    except SQLAlchemyError as exc:  # its text may hold a password
        raise FeatureStoreError(
            f"the registry of the feature views in {folder} cannot be read "
            f"({type(getattr(exc, 'orig', exc)).__name__}); expected the profile's own, whole. "
            "Refresh the features, or bring a backup with `falaj restore`. Nothing was changed"
        ) from exc
    tables, ledger = current_tables(folder, settings.store), load_ledger(folder)
    refs = {ref.name: ref for ref in tables.tables}
    online = {view.name: view.watermark for view in ledger.views} if ledger else {}
    found = []
    for spec in (FeatureView.FromString(row).spec for row in rows):
        source = spec.batch_source
        ref = refs.get(table := source.file_options.uri or source.name)
        (newest,) = latest(ref, [source.timestamp_field], settings.store) if ref else (None,)
        view = {name: getattr(spec, name) for name in ("name", "description", "owner")}
        view["entities"] = [name for name in spec.entities if not name.startswith("__")]
        kinds = ((f.name, ValueType.Enum.Name(f.value_type)) for f in spec.features)
        view["features"] = {name: kind.lower() for name, kind in kinds}
        view |= {"table": table, "sha256": ref.artifact.sha256 if ref else None}
        view |= {"handling": tables.handling, "newest_event": newest}
        view["published"] = written(folder / PUBLISHED) if ref else None
        found.append({**view, "online_until": online.get(spec.name)})
    return sorted(found, key=lambda view: view["name"])


def written(file: Path) -> datetime:
    """When a file was written last."""
    return datetime.fromtimestamp(file.stat().st_mtime, UTC)
