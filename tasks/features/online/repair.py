"""Write views online again from their tables, or forget what is online of them.

For what no materialization mends by itself: a value without a trace of what wrote it, a wrong push,
an entity whose values must go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from feast import FeatureStore, FeatureView
from feast.infra.key_encoding_utils import serialize_entity_key
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.type_map import python_values_to_proto_values
from feast.value_type import ValueType

from tasks.contracts.data import FeatureTables
from tasks.features.access.provider import AuditedProvider
from tasks.features.access.store import open_store, quiet
from tasks.features.access.versions import view_versions
from tasks.features.online.newer_wins import NewerWinsOnlineStore
from tasks.features.online.vector_engine import BEGINNING
from tasks.features.tables.build import features_folder
from tasks.features.tables.ledger import load_ledger
from tasks.kernel.errors import ConfigurationError, FeatureStoreError
from tasks.kernel.settings import ArtifactStore


def rebuild_views(
    tables: FeatureTables,
    names: Sequence[str],
    home: Path,
    repo: Path,
    store: ArtifactStore,
    *,
    pushed: bool,
) -> dict[str, int]:
    """Make views hold online, in their newest version, what their tables hold up to the watermark.

    Readers go on meanwhile: tables are written first, and only what they could not replace is then
    removed, and written again.

    Args:
        tables: the published ones.
        names: views; none for all that are online.
        pushed: also remove what was pushed.

    Returns:
        View to the number of entities written.

    Raises:
        ConfigurationError: there is no such view, or the online store keeps no origins.
        FeatureStoreError: nothing is online yet.
    """
    ledger = load_ledger(home)
    if ledger is None:
        raise FeatureStoreError(
            "nothing is known of what is online; run the feature refresh, which then writes all of "
            "history. Nothing was written"
        )
    feast = open_store(home, repo, features_folder(tables, store))
    provider = _provider(feast)
    watermarks = {view.name: view.watermark for view in ledger.views}
    views = _chosen(feast, names)
    with provider.recorded("rebuild", {"views": sorted(views)}, pushed=pushed), quiet():
        for name, view in views.items():
            last = watermarks.get(name, max(watermarks.values())) - timedelta(microseconds=1)
            feast.materialize(BEGINNING, last, feature_views=[name])
            extent = "not of the table" if pushed else "unknown"
            if provider.online_store.remove_values(feast.config, view, extent=extent):
                feast.materialize(BEGINNING, last, feature_views=[name])
    return {name: provider.batch_engine.writes[name].num_rows for name in views}


def forget_values(
    names: Sequence[str],
    key: Mapping[str, str],
    features: Sequence[str],
    home: Path,
    repo: Path,
) -> dict[str, int]:
    """Remove values online, of all versions of the views.

    Args:
        names: views; none for all of the entity's kind.
        key: join key to value of one entity; empty for all entities.
        features: names; none for all.

    Returns:
        View to the number of entities of which something was removed.

    Raises:
        ConfigurationError: no view is meant, a view has other keys or no such feature, or the
            online store keeps no origins.
    """
    feast = open_store(home, repo)
    provider = _provider(feast)
    views = _meant(feast, names, key, features)
    subject = {"views": sorted(views), "features": sorted(features)}
    found: dict[str, int] = {}
    with provider.recorded("forget", subject, entities="one" if key else "all"):
        for name, view in views.items():
            packed = [_packed(view, key, feast.config.entity_key_serialization_version)]
            found[name] = max(
                provider.online_store.remove_values(
                    feast.config, version, packed if key else None, features or None
                )
                for version in _versions(feast, view)
            )
    return found


def _provider(feast: FeatureStore) -> AuditedProvider:
    provider = feast._get_provider()
    assert isinstance(provider, AuditedProvider)  # the profile is refused otherwise
    if not isinstance(provider.online_store, NewerWinsOnlineStore):
        raise ConfigurationError(
            f"the online store is a {type(provider.online_store).__name__}, which does not know "
            "what wrote a value; use one of this project for it. Nothing was changed"
        )
    return provider


def _chosen(feast: FeatureStore, names: Sequence[str]) -> dict[str, FeatureView]:
    views = {view.name: view for view in feast.list_feature_views() if view.online}
    if unknown := sorted(set(names) - views.keys()):
        raise ConfigurationError(
            f"feature view {', '.join(unknown)} is not online; there are: "
            f"{', '.join(sorted(views)) or 'none'}. Nothing was changed"
        )
    return {name: views[name] for name in names or sorted(views)}


def _meant(
    feast: FeatureStore, names: Sequence[str], key: Mapping[str, str], features: Sequence[str]
) -> dict[str, FeatureView]:
    if not names and not key:
        raise ConfigurationError("name a feature view, or an entity by --key. Nothing was changed")
    views = _chosen(feast, names)
    if not names:
        views = {n: view for n, view in views.items() if set(view.join_keys) == key.keys()}
    for name, view in views.items():
        if key and set(view.join_keys) != key.keys():
            raise ConfigurationError(
                f"feature view {name} has the key {', '.join(sorted(view.join_keys)) or 'none'}, "
                f"not {', '.join(sorted(key))}. Nothing was changed"
            )
        known = [feature.name for feature in view.features]
        if lacking := sorted(set(features) - set(known)):
            raise ConfigurationError(
                f"feature view {name} has no feature {', '.join(lacking)}; it has "
                f"{', '.join(known)}. Nothing was changed"
            )
    if not views:
        raise ConfigurationError(
            f"no feature view has the key {', '.join(sorted(key))}. Nothing was changed"
        )
    return views


def _packed(view: FeatureView, key: Mapping[str, str], version: int) -> bytes:
    kinds = {column.name: column.dtype.to_value_type() for column in view.entity_columns}
    values = [
        python_values_to_proto_values([_typed(name, text, kinds[name])], kinds[name])[0]
        for name, text in key.items()
    ]
    packed = EntityKey(join_keys=list(key), entity_values=values)
    return bytes(serialize_entity_key(packed, entity_key_serialization_version=version))


def _typed(name: str, text: str, kind: ValueType) -> Any:
    try:
        return {ValueType.INT32: int, ValueType.INT64: int, ValueType.STRING: str}[kind](text)
    except (KeyError, ValueError) as exc:
        raise ConfigurationError(
            f"join key {name} is {kind.name}, and {text!r} is given; only texts and whole numbers "
            "can be named. Nothing was changed"
        ) from exc


def _versions(feast: FeatureStore, view: FeatureView) -> list[FeatureView]:
    """The view at all numbers under which values may be online."""
    numbers = view_versions(feast, view.name)
    found = [
        feast.registry.get_feature_view_by_version(view.name, feast.project, number)
        for number in numbers
        if number != (view.current_version_number or 0)
    ]
    return [view, *(version for version in found if isinstance(version, FeatureView))]
