"""What a snapshot was made from, kept beside its data: definitions, SQL texts and their digests.

The folder `evidence` of a snapshot holds

    definitions.json   entities, feature views and the service, at the versions that were read
    features.json      the part of the configuration that says how training rows are made
    retrieval.sql      the point-in-time join as it ran, places of this machine replaced by names
    sql/...            the query of the entity frame and those that it reads, as in the repository

so it is a feature repository in small: `tasks.features.checks.verification` makes the snapshot
again from it. It names no moment and no machine, so equal inputs give an equal folder.
"""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import duckdb
from feast import Entity, FeatureService, FeatureStore, FeatureView
from feast.data_source import DataSource
from feast.infra.offline_stores.offline_store import RetrievalJob
from google.protobuf.json_format import MessageToDict

from tasks.contracts.data import FeatureTables, SnapshotPins, TablePin, TableRef, ViewPin
from tasks.features.access.store import GuardedFeatureStore
from tasks.features.access.versions import ServiceVersion, view_digest
from tasks.features.config import FeatureConfig, TrainingSet
from tasks.features.declared.queries import frame_query, read_query
from tasks.features.offline.duck import parquet, sql_name
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key

FOLDER = "evidence"
DEFINITIONS = "definitions.json"
CONFIGURATION = "features.json"
RETRIEVAL = "retrieval.sql"
COMPILED = "sql/training_set.sql"
SOFTWARE = ("feast", "duckdb", "polars", "pyarrow")
_VOLATILE = frozenset(
    {"createdTimestamp", "lastUpdatedTimestamp", "materializationIntervals", "versionId", "state"}
)


def pin(
    feast: GuardedFeatureStore,
    service: ServiceVersion,
    tables: FeatureTables,
    config: FeatureConfig,
    store: ArtifactStore,
    job: RetrievalJob,
    folder: StagedFolder,
) -> SnapshotPins:
    """Write the evidence of a retrieval that was just done, and name all of it.

    Args:
        service: the version that was read.
        job: the retrieval, for the text of its query.
        folder: where the snapshot is being written; its entity frame is `entities.parquet` there.
    """
    views = pinned_views(feast, service)
    evidence = folder.path / FOLDER
    evidence.mkdir()
    places = {str(folder.path / "entities.parquet"): "${ENTITIES}"}
    for name in ("tables_path", "spill_path"):
        place = str(getattr(feast.config.offline_store, name, "") or "")
        places |= {place: f"${{{name}}}", str(Path(place).resolve()): f"${{{name}}}"}
    retrieval = job.to_sql()
    for place in sorted(filter(None, places), key=len, reverse=True):
        retrieval = retrieval.replace(place, places[place])
    (evidence / RETRIEVAL).write_text(retrieval, encoding="utf-8")
    _write_json(evidence / DEFINITIONS, _definitions(feast, service, views))
    spec, frame = config.training_set, frame_query(feast.repo, config)
    if not spec.sql:  # what it was compiled to then is what verifies it later
        config = config.model_copy(update={"training_set": _of_query(spec)})
    _write_json(evidence / CONFIGURATION, config.model_dump(mode="json"))
    texts = [(config.training_set.sql, frame)]
    texts += [(query.sql, read_query(feast.repo, query.sql)) for query in config.staging]
    for name, text in texts:
        copy = evidence / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    return SnapshotPins(
        service_version=service.number,
        service_definition=service.digest,
        registry=content_key(definitions_in_registry(feast)),
        views={v.name: _view_pin(v, service, tables, store) for v in views},
        tables=(
            *(_table_pin("raw", ref) for ref in tables.raw),
            *(_table_pin("features", ref) for ref in tables.tables),
        ),
        entity_sql=content_key([[name, text] for name, text in texts]),
        retrieval_sql=content_key(retrieval),
        software={name: version(name) for name in SOFTWARE},
        evidence=folder.artifact(FOLDER),
    )


def _of_query(spec: TrainingSet) -> TrainingSet:
    """A training set from a table as one of the query that it was compiled to."""
    plain = TrainingSet.model_fields
    known = {n: plain[n].default for n in ("source", "label_known_after", "predict_after")}
    return spec.model_copy(update={**known, "sql": COMPILED, "label": spec.label_column})


def pinned_views(feast: FeatureStore, service: ServiceVersion) -> list[FeatureView]:
    """The views of a service at the versions that it reads.

    Raises:
        FeatureStoreError: the registry no longer holds one of them.
    """
    found = []
    for name, number in service.views.items():
        view = feast.registry.get_feature_view_by_version(name, feast.project, number)
        if not isinstance(view, FeatureView):
            raise FeatureStoreError(
                f"{service.registered_name} reads {name}@v{number}, which is a "
                f"{type(view).__name__}; a snapshot is made of feature views alone"
            )
        found.append(view)
    return found


def definitions_in_registry(feast: FeatureStore) -> dict[str, list[Any]]:
    """All active definitions of the project, without moments and numbers, in order of name."""
    return {
        "entities": _by_name(feast.list_entities()),
        "data_sources": _by_name(feast.list_data_sources()),
        "feature_views": _by_name(feast.list_feature_views()),
    }


def _definitions(
    feast: FeatureStore, service: ServiceVersion, views: list[FeatureView]
) -> dict[str, Any]:
    named = {name for view in views for name in view.entities}
    return {
        "project": feast.project,
        "entities": _by_name(each for each in feast.list_entities() if each.name in named),
        "feature_views": [_as_json(view) for view in views],
        "feature_service": _as_json(feast.get_feature_service(service.registered_name)),
    }


def _by_name(things: Iterable[Entity | DataSource | FeatureView]) -> list[Any]:
    return [_as_json(each) for each in sorted(things, key=lambda each: str(each.name))]


def _as_json(thing: Entity | DataSource | FeatureView | FeatureService) -> Any:
    return _steady(MessageToDict(thing.to_proto()))


def _steady(value: Any) -> Any:
    """The value without what depends on when it was registered."""
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list):
        return [_steady(item) for item in value]
    return value


def _view_pin(
    view: FeatureView, service: ServiceVersion, tables: FeatureTables, store: ArtifactStore
) -> ViewPin:
    source = view.batch_source
    table = str(getattr(source, "path", None) or source.name)
    ref = next((t for t in tables.tables if t.name == table), None)
    times = [source.timestamp_field, source.created_timestamp_column]
    event, created = latest(ref, times, store) if ref else (None, None)
    return ViewPin(
        version=service.views[view.name],
        definition=view_digest(view),
        table=table,
        last_event=event,
        last_created=created,
    )


def latest(
    ref: TableRef, columns: list[str | None], store: ArtifactStore
) -> tuple[datetime | None, ...]:
    """Latest value of each column that is one; from the statistics of the files where they do."""
    wanted = ", ".join(f"max({sql_name(c)})::TIMESTAMPTZ" if c else "NULL" for c in columns)
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        folder = store.path(ref.artifact, verify=False)
        row = con.execute(f"SELECT {wanted} FROM {parquet(folder)}").fetchall()[0]
    return tuple(moment.astimezone(UTC) if moment else None for moment in row)


def _table_pin(group: Literal["raw", "features"], ref: TableRef) -> TablePin:
    return TablePin(name=ref.name, group=group, sha256=ref.artifact.sha256, num_rows=ref.num_rows)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
