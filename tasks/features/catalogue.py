"""The feature views of a use case, as its registry and its published tables describe them.

Nothing of the project is needed, and no value is read but the newest moment of each table.
"""

from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import duckdb
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from tasks.contracts.base import Contract
from tasks.features.access.profile import import_feast
from tasks.features.offline.duck import parquet, sql_name
from tasks.features.tables.build import PUBLISHED, current_tables
from tasks.features.tables.ledger import load_ledger, read_json
from tasks.governance.handling import Handling
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.settings import ArtifactStore, bring

APPLIED = Path("feast") / "applied.json"
"""In a use case's folder: the project whose definitions were applied."""


class CataloguedView(Contract):
    """A feature view, and how fresh it is; moments are None where nothing was written."""

    name: str
    description: str
    owner: str
    """As its definition names one, for Feast."""
    entities: tuple[str, ...]
    features: dict[str, str]
    """Feature to its type, as Feast calls it."""
    table: str
    """Feature table that it reads."""
    sha256: str | None
    """Of the published table."""
    handling: Handling | None
    """How its rows are to be treated: the strictest class, all homes of the raw tables; None in
    tables of earlier releases."""
    newest_event: datetime | None
    published: datetime | None
    online_until: datetime | None


def catalogued_views(
    folder: Path, registry: str | None, store: ArtifactStore
) -> list[CataloguedView]:
    """The views that were applied, by name; nothing is written.

    Args:
        folder: the use case's part of a state folder, `Settings.features_home`.
        registry: SQLAlchemy address; None for the file that the profile `local` has.
        store: of the state.

    Raises:
        FeatureStoreError: the registry cannot be read.
        ArtifactError: what describes the published tables is gone or damaged.
    """
    import_feast()
    from feast.protos.feast.core.FeatureView_pb2 import FeatureView
    from feast.protos.feast.types.Value_pb2 import ValueType

    file = quote(str(folder / "feast" / "registry.db"))
    address = registry or f"sqlite:///file:{file}?mode=ro&uri=true"
    project = {"project": read_json(bring(folder / APPLIED)).get("project")}
    query = "SELECT feature_view_proto FROM feature_views WHERE project_id = :project"
    try:
        with create_engine(address, poolclass=NullPool).connect() as connection:
            rows = connection.execute(text(query), project).scalars().all()
    except SQLAlchemyError as exc:  # its text may hold a password
        raise FeatureStoreError(
            f"the registry of the feature views in {folder} cannot be read "
            f"({type(getattr(exc, 'orig', exc)).__name__}); expected the profile's own, whole. "
            "Refresh the features, or bring a backup with `falaj restore`. Nothing was changed"
        ) from exc
    tables, ledger = current_tables(folder, store), load_ledger(folder)
    refs = {ref.name: ref for ref in tables.tables}
    online = {view.name: view.watermark for view in ledger.views} if ledger else {}
    found = []
    for spec in (FeatureView.FromString(row).spec for row in rows):
        source = spec.batch_source
        ref = refs.get(table := source.file_options.uri or source.name)
        path = store.path(ref.artifact, verify=False) if ref else None
        view = CataloguedView(
            name=spec.name,
            description=spec.description,
            owner=spec.owner,
            entities=tuple(name for name in spec.entities if not name.startswith("__")),
            features={f.name: ValueType.Enum.Name(f.value_type).lower() for f in spec.features},
            table=table,
            sha256=ref.artifact.sha256 if ref else None,
            handling=tables.handling,
            newest_event=_newest(path, source.timestamp_field) if path else None,
            published=_written(folder / PUBLISHED) if path else None,
            online_until=online.get(spec.name),
        )
        found.append(view)
    return sorted(found, key=lambda view: view.name)


def _newest(table: Path, column: str) -> datetime | None:
    """From the statistics of the files."""
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        query = f"SELECT max({sql_name(column)})::TIMESTAMPTZ FROM {parquet(table)}"
        moment = con.execute(query).fetchall()[0][0]
    return moment.astimezone(UTC) if moment else None


def _written(file: Path) -> datetime:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC)
