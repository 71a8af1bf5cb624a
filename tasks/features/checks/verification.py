"""Make a snapshot again from what it pins, and say whether the same bytes come out.

Nothing of the present state is trusted: definitions and SQL texts come from the snapshot's own
evidence, tables from the artifact store by their digests. The registry, the published tables and
the feature repository may have moved on; they are not read.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import duckdb
from feast import Entity, FeatureService, FeatureStore, FeatureView
from feast.protos.feast.core.Entity_pb2 import Entity as EntityProto
from feast.protos.feast.core.FeatureService_pb2 import FeatureService as FeatureServiceProto
from feast.protos.feast.core.FeatureView_pb2 import FeatureView as FeatureViewProto
from feast.repo_config import RepoConfig
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from pydantic import ValidationError

from tasks.contracts.data import FeatureSnapshot, FeatureTables, SnapshotPins
from tasks.features.access.profile import read_profile
from tasks.features.access.store import GuardedFeatureStore, quiet
from tasks.features.checks.report import SnapshotVerification
from tasks.features.config import recorded_config
from tasks.features.entities import write_entities
from tasks.features.offline.duck import parquet
from tasks.features.snapshot import DATA_FILE, retrieve
from tasks.features.tables.build import TABLES, features_folder
from tasks.features.tables.evidence import CONFIGURATION, DEFINITIONS, SOFTWARE
from tasks.features.tables.ledger import SNAPSHOTS
from tasks.kernel.errors import ArtifactError
from tasks.kernel.files import digest_of, scratch_folder
from tasks.kernel.settings import ArtifactStore, Settings

logger = logging.getLogger(__name__)

Proto = TypeVar("Proto", bound=Message)


def find_snapshot(name: str, store: ArtifactStore) -> FeatureSnapshot:
    """The snapshot whose content digest or folder begins with `name`.

    Raises:
        ArtifactError: there is none, or more than one.
    """
    found: dict[str, FeatureSnapshot] = {}
    for folder in store.folders(SNAPSHOTS):
        file = folder / "value.json"
        try:
            snapshot = FeatureSnapshot.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError:
            logger.warning("%s is no snapshot of this release; it is passed over", file)
            continue
        digest = snapshot.data.sha256
        if name and (digest.startswith(name) or file.parent.name.startswith(name)):
            # Two folders may hold the same rows; the one that pins what made them says more.
            if digest not in found or found[digest].pins is None:
                found[digest] = snapshot
    if len(found) != 1:
        held = ", ".join(sorted(digest[:12] for digest in found)) or "none"
        raise ArtifactError(
            f"{name!r} names {len(found)} snapshots ({held}); give the beginning of one digest, as "
            "the report or `falaj trace` shows it"
        )
    return next(iter(found.values()))


def verify_snapshot(snapshot: FeatureSnapshot, settings: Settings) -> SnapshotVerification:
    """Rebuild a snapshot aside, from its pins, and compare it with what it is said to be.

    Args:
        snapshot: as a model version, a report or `find_snapshot` names it.
        settings: the store that holds the pinned tables and the evidence; the feature repository,
            for the settings of the offline store.

    Raises:
        ConfigurationError: the profile of the feature store is wrong.
    """
    pins, store = snapshot.pins, settings.store
    if pins is None:
        return _not_rebuilt(
            snapshot, "it pins nothing: it was made by a release that kept no evidence"
        )
    tables = _find_tables(snapshot, store)
    if tables is None:
        return _not_rebuilt(
            snapshot, f"no tables of version {snapshot.tables_version[:12]} are kept any more"
        )
    needed = (pins.evidence, *(ref.artifact for ref in (*tables.raw, *tables.tables)))
    if lost := [artifact.uri for artifact in needed if not store.holds(artifact)]:
        return _not_rebuilt(snapshot, f"{', '.join(lost)} cannot be read as it was")
    evidence = store.path(pins.evidence)
    config = recorded_config((evidence / CONFIGURATION).read_text(encoding="utf-8"))
    definitions = json.loads((evidence / DEFINITIONS).read_text())
    with scratch_folder(".verify", store.root) as scratch:
        frame, rebuilt = scratch / "entities.parquet", scratch / DATA_FILE
        # The evidence is laid out like a repository: SQL files bear the configuration's names.
        write_entities(tables, snapshot.window, config, evidence, store, frame)
        feast = _private_store(definitions, settings, features_folder(tables, store), scratch)
        retrieve(feast, feast.list_feature_services()[0], config.training_set, frame, rebuilt)
        digest = digest_of(rebuilt)
        same = digest == (snapshot.retrieved_sha256 or snapshot.data.sha256)
        differences = () if same else tuple(_differences(snapshot, rebuilt, store))
    return SnapshotVerification(
        snapshot_sha256=snapshot.data.sha256,
        rebuilt_sha256=digest,
        differences=differences,
        remarks=tuple(_remarks(snapshot, pins, tables, store)),
    )


def _not_rebuilt(snapshot: FeatureSnapshot, *reasons: str) -> SnapshotVerification:
    return SnapshotVerification(
        snapshot_sha256=snapshot.data.sha256, rebuilt_sha256=None, differences=reasons, remarks=()
    )


def _find_tables(snapshot: FeatureSnapshot, store: ArtifactStore) -> FeatureTables | None:
    """The tables that were read; else others with the same rows, written in another way."""
    pinned = {t.sha256 for t in snapshot.pins.tables} if snapshot.pins else set()
    alike = []
    for folder in store.folders(TABLES):
        with suppress(ValidationError):
            value = (folder / "value.json").read_text(encoding="utf-8")
            tables = FeatureTables.model_validate_json(value)
            if tables.version == snapshot.tables_version:
                alike.append(tables)

    def is_pinned(tables: FeatureTables) -> bool:
        return {ref.artifact.sha256 for ref in (*tables.raw, *tables.tables)} == pinned

    return max(alike, key=is_pinned, default=None)


def _private_store(
    definitions: dict[str, Any], settings: Settings, tables_path: Path, scratch: Path
) -> FeatureStore:
    """A feature store with nothing but the pinned definitions and tables."""
    home, repo = settings.features_home, settings.feature_repo
    described = read_profile(home, repo)
    described["project"] = definitions["project"]
    described["registry"] = {
        "registry_type": "file",
        "path": str(scratch / "registry.db"),
        "enable_online_feature_view_versioning": True,
    }
    described["online_store"] = {"type": "sqlite", "path": str(scratch / "online.db")}
    described["offline_store"]["tables_path"] = str(tables_path)
    described.pop("batch_engine", None)
    feast = GuardedFeatureStore(RepoConfig(**described, repo_path=repo), home)
    registry, project = feast.registry, feast.project
    with quiet():
        for content in definitions["entities"]:
            registry.apply_entity(Entity.from_proto(_parsed(content, EntityProto())), project)
        for content in definitions["feature_views"]:
            view = FeatureView.from_proto(_parsed(content, FeatureViewProto()))
            view.version = f"v{view.current_version_number or 0}"
            registry.apply_feature_view(view, project)
        service = _parsed(definitions["feature_service"], FeatureServiceProto())
        registry.apply_feature_service(FeatureService.from_proto(service), project)
    return feast


def _parsed(content: dict[str, Any], empty: Proto) -> Proto:
    parsed: Proto = ParseDict(content, empty, ignore_unknown_fields=True)
    return parsed


def _remarks(
    snapshot: FeatureSnapshot, pins: SnapshotPins, tables: FeatureTables, store: ArtifactStore
) -> Iterator[str]:
    """What has changed since in what wrote the file, which could show in its bytes."""
    used = {ref.artifact.sha256 for ref in (*tables.raw, *tables.tables)}
    if used != {pin.sha256 for pin in pins.tables}:
        yield "the tables that were read are gone; others with the same rows took their place"
    for name in SOFTWARE:
        if pins.software.get(name) != version(name):
            yield f"{name} was {pins.software.get(name, 'not recorded')}, now {version(name)}"
    if not store.holds(snapshot.data):
        yield f"the stored file {snapshot.data.uri} is absent or damaged"


def _differences(snapshot: FeatureSnapshot, rebuilt: Path, store: ArtifactStore) -> Iterator[str]:
    """What differs between the stored file and the rebuilt one, in rows and columns."""
    try:
        stored = store.path(snapshot.data)
    except ArtifactError as exc:
        yield f"the rebuilt file has SHA-256 {digest_of(rebuilt)[:12]}, and {exc}"
        return
    old, new = (f"FROM {parquet(file)}" for file in (stored, rebuilt))
    with duckdb.connect() as con:
        columns = [con.execute(f"DESCRIBE {side}").fetchall() for side in (old, new)]
        if columns[0] != columns[1]:
            changed = {row[0] for row in set(columns[0]) ^ set(columns[1])}
            yield f"columns differ: {', '.join(sorted(changed))}"
            return
        gone, added = (
            con.execute(f"SELECT count(*) FROM ({a} EXCEPT ALL {b})").fetchall()[0][0]
            for a, b in ((old, new), (new, old))
        )
    if gone or added:
        yield f"{gone} stored rows are not in the rebuilt file, {added} rebuilt ones are new"
    else:
        yield "the rows are equal, the bytes are not: other versions wrote the file"
