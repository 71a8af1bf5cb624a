"""Materialize feature views: bring the online store up to the end of a window, under guards.

And by hand what no materialization mends: write views again from their tables, or forget values.

A model reads the version of a service that it was trained on until its successor is promoted, days
after the definitions changed. Feast materializes the newest version of a view alone, so those of
earlier services are written here.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from feast import FeatureStore, FeatureView
from feast.feature_store import tqdm

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables, MaterializedView
from tasks.features.access import versions
from tasks.features.access.provider import AuditedProvider
from tasks.features.access.store import apply_definitions, open_store, quiet, table_columns
from tasks.features.config import MaterializationConfig
from tasks.features.offline.duck import duckdb_session, names, parquet, sql_name
from tasks.features.offline.source import source_name
from tasks.features.online.backend import key_values
from tasks.features.online.newer_wins import NewerWinsOnlineStore, Removal
from tasks.features.online.plan import KeyGroup
from tasks.features.online.vector_engine import BEGINNING, VectorComputeEngine
from tasks.features.tables import ledger as ledgers
from tasks.features.tables.build import features_folder
from tasks.features.tables.evidence import pinned_views
from tasks.governance.erasure import Theirs
from tasks.kernel.errors import ConfigurationError, FeatureStoreError, WindowError
from tasks.kernel.settings import Settings

logger = logging.getLogger(__name__)


def materialize(
    tables: FeatureTables,
    window: TimeWindow,
    settings: Settings,
    config: MaterializationConfig = MaterializationConfig(),  # noqa: B008 (frozen)
) -> tuple[MaterializedView, ...]:
    """Write each view's newest values of the window online, and of windows changed since the last.

    What an earlier version of a table had put online and a corrected one no longer has is taken
    back, `newer_wins.py` says how; pushed values stay until newer ones come. Watermarks move, all
    together, only after every view was written, so a killed run is simply done again. Nothing is
    done where this version of the tables is online up to the window's end. Two processes may do it
    at once: of two values the newer stays, and so does the later watermark.

    Without a ledger that speaks of this very store (it was lost or damaged, or the store is new,
    emptied or another's), all of history is written. The end is then the window's, or that of all
    landed rows where the store holds a token: it was filled before, nobody knows how far.

    Raises:
        WindowError: the window ends in the future, is empty or reversed. Nothing was touched.
        FeatureStoreError: fewer entities were written than there are. The watermark did not move.
        TransientError: the online store did not answer or was locked.
    """
    if window.end <= window.start:  # a window can be made without its own check
        raise WindowError(f"window {window} is empty or reversed. Nothing was touched")
    window.check_not_in_future(datetime.now(UTC))
    home, repo = settings.features_home, settings.feature_repo
    done = ledgers.online_views(tables, window, home, repo)
    if done is not None:
        return done
    ledger, token = ledgers.load_ledger(home), ledgers.read_token(home, repo)
    present = ledger is not None and token == ledger.token
    feast = open_store(home, repo, features_folder(tables, settings.store))
    apply_definitions(feast, again=not present)
    # Other definitions, or an online store of which nothing is known: not this window alone.
    same = present and ledger is not None and _holds_these_views(ledger, feast, repo)
    changed = _changed_since(tables, window, ledger if same else None)
    since = changed - timedelta(hours=config.lateness_hours) if same else BEGINNING
    until = _reach(tables, window, ledger, token)
    grew = same and ledger is not None and all(v.watermark <= changed for v in ledger.views)
    _engine(feast).takes_back = not grew
    written = tuple(
        _materialize_view(feast, view, since, until)
        for view in sorted(feast.list_feature_views(), key=lambda v: v.name)
        if view.online
    )
    write_earlier_versions(feast, since, until - timedelta(microseconds=1), config.earlier_versions)
    versions.publish_services(feast)  # before the ledger: a run killed in between does it again
    token = ledgers.read_token(home, repo)
    if token is None:  # a store of nobody: two installations that share one keep the first token
        token = ledgers.new_token()
        ledgers.write_token(home, repo, token)
    ledgers.write_ledger(tables, repo, written, home, token)
    return written


def _changed_since(
    tables: FeatureTables, window: TimeWindow, ledger: ledgers.Ledger | None
) -> datetime:
    """Start of the first window whose rows are not those that were materialized last.

    A refresh may have been published and killed before it was materialized.
    """
    known = ledger.sources if ledger else {}
    changed = [name for name, digest in tables.sources.items() if known.get(name) != digest]
    return min([window.start, *[datetime.fromisoformat(name.split("/")[0]) for name in changed]])


def _reach(
    tables: FeatureTables, window: TimeWindow, ledger: ledgers.Ledger | None, token: int | None
) -> datetime:
    """The moment up to which to write, so that nothing online is newer than the watermark.

    A window refreshed again also changes features after it, up to what is online already. A store
    filled under a token that the ledger does not know may hold all that ever landed.
    """
    ends = [window.end, *(view.watermark for view in (ledger.views if ledger else ()))]
    if token is not None and (ledger is None or ledger.token != token):
        ends += [datetime.fromisoformat(name.split("/")[1]) for name in tables.sources]
    return max(ends)


def _holds_these_views(ledger: ledgers.Ledger, feast: FeatureStore, repo: Path) -> bool:
    """True where what was materialized are the versions of the views that are active now.

    Definitions that were taken back after a refused run are the same again, as other versions.
    """
    written = {view.name: view.version for view in ledger.views}
    return ledger.definitions == ledgers.definitions_digest(repo) and all(
        written.get(view.name) == (view.current_version_number or 0)
        for view in feast.list_feature_views()
        if view.online
    )


def _materialize_view(
    feast: FeatureStore, view: FeatureView, since: datetime, until: datetime
) -> MaterializedView:
    start = since if view.ttl else BEGINNING
    last = until - timedelta(microseconds=1)  # Feast's end is inside, a window's is not
    with quiet():
        feast.materialize(start, last, feature_views=[view.name])
    in_window, in_all = _count_keys(feast, view, start, last)
    write = _engine(feast).writes[view.name]
    count = getattr(feast._get_provider().online_store, "count_entities", None)
    online = count(feast.config, view) if count else max(in_all, write.num_rows)
    if min(online, write.num_rows) < in_window:
        raise FeatureStoreError(
            f"feature view {view.name}: {write.num_rows:,} entities were written, {online:,} are "
            f"online, expected {in_window:,} up to {until:%Y-%m-%dT%H:%MZ}. The watermark was not "
            "moved; run again"
        )
    logger.info("materialized %s: %s entities", view.name, f"{online:,}")
    return MaterializedView(
        name=view.name,
        watermark=until,
        num_entities=online,
        num_written=write.num_written,
        num_kept=write.num_kept,
        num_taken_back=write.num_taken_back,
        num_converted_by_feast=write.num_feast_cells + write.num_feast_rows * len(view.features),
        version=view.current_version_number or 0,
        definition=versions.view_digest(view),
        table=view.batch_source.path,
    )


def _engine(feast: FeatureStore) -> VectorComputeEngine:
    engine = feast._get_provider().batch_engine
    assert isinstance(engine, VectorComputeEngine)  # the profile is refused otherwise
    return engine


def _count_keys(
    feast: FeatureStore, view: FeatureView, start: datetime, last: datetime
) -> tuple[int, int]:
    """Entities with a row from `start` to `last`, and with any up to `last`, both included.

    None are counted where the table is not on this machine: the engine's own count must do then.
    """
    offline, source = feast.config.offline_store, view.batch_source
    named = {view_name: name for name, view_name in source.field_mapping.items()}
    keys = [named.get(column.name, column.name) for column in view.entity_columns]
    folder = Path(getattr(offline, "tables_path", "")) / source.path
    if not hasattr(offline, "spill_path") or not folder.exists():
        return 0, 0
    with duckdb_session(
        Path(offline.spill_path), memory_limit_mb=offline.memory_limit_mb, threads=offline.threads
    ) as con:
        moment = f"{sql_name(source.timestamp_field)}::TIMESTAMPTZ"
        row = con.execute(
            "SELECT count(*) FILTER (newest >= ?::TIMESTAMPTZ), count(*) FROM "
            f"(SELECT {names(keys)}, max({moment}) AS newest FROM {parquet(folder)} "
            f"WHERE {moment} <= ?::TIMESTAMPTZ GROUP BY {names(keys)})",
            [start, last],
        ).fetchall()[0]
    return int(row[0]), int(row[1])


def write_earlier_versions(
    feast: FeatureStore, start: datetime, last: datetime, num_versions: int
) -> None:
    """Write the views of each service's earlier versions that are not the newest of their view.

    A version whose table has lost one of its columns cannot go on; it is left out with a warning,
    and its values age.

    Args:
        start: first event time that is written.
        last: last event time that is written.
        num_versions: so many versions of each service before its newest one.
    """
    provider = feast._get_provider()
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
        logger.info("materialized %s for an earlier version of a service", name)


def earlier_views(feast: FeatureStore, num_versions: int) -> list[FeatureView]:
    """Views as earlier versions of services read them, without those that are still the newest."""
    newest = {view.name: view.current_version_number or 0 for view in feast.list_feature_views()}
    found: dict[tuple[str, int], FeatureView] = {}
    for service in sorted({s.name for s in feast.list_feature_services()}):
        known = versions.service_versions(feast, service)[:-1]
        for version in known[max(len(known) - num_versions, 0) :]:
            for view in pinned_views(feast, version):
                number = version.views[view.name]
                if view.online and number != newest.get(view.name):
                    found[view.name, number] = view
    return [found[key] for key in sorted(found)]


def _lost_columns(feast: FeatureStore, view: FeatureView) -> list[str]:
    """Columns that the view reads and its table no longer has."""
    source, present = view.batch_source, table_columns(feast, view.batch_source)
    times = [t for t in (source.timestamp_field, source.created_timestamp_column) if t]
    read = [*times, *(column.name for column in (*view.features, *view.entity_columns))]
    return sorted(name for name in read if source_name(source, name, present) is None)


def rebuild_views(
    tables: FeatureTables, names: Sequence[str], settings: Settings, *, pushed: bool
) -> dict[str, int]:
    """Make views hold online, in their newest version, what their tables hold up to the watermark.

    Readers go on meanwhile: tables are written first, and only what they could not replace is then
    removed, and written again.

    Args:
        tables: the published ones.
        names: views; none for all that are online.
        settings: the installation.
        pushed: also remove what was pushed.

    Returns:
        View to the number of entities written.

    Raises:
        ConfigurationError: there is no such view, or the online store keeps no origins.
        FeatureStoreError: nothing is online yet.
    """
    home = settings.features_home
    ledger = ledgers.load_ledger(home)
    if ledger is None:
        raise FeatureStoreError(
            "nothing is known of what is online; run the feature refresh, which then writes all of "
            "history. Nothing was written"
        )
    feast = open_store(home, settings.feature_repo, features_folder(tables, settings.store))
    provider = _provider(feast)
    watermarks = {view.name: view.watermark for view in ledger.views}
    views = _chosen(feast, names)
    with provider.recorded("rebuild", {"views": sorted(views)}, pushed=pushed), quiet():
        for name, view in views.items():
            last = watermarks.get(name, max(watermarks.values())) - timedelta(microseconds=1)
            feast.materialize(BEGINNING, last, feature_views=[name])
            meant = Removal("not of the table" if pushed else "unknown")
            if provider.online_store.remove_values(feast.config, view, meant):
                feast.materialize(BEGINNING, last, feature_views=[name])
    return {name: provider.batch_engine.writes[name].num_rows for name in views}


def forget_values(
    names: Sequence[str], key: Mapping[str, str], features: Sequence[str], settings: Settings
) -> dict[str, int]:
    """Remove values online, of all versions of the views.

    Args:
        names: views; none for all of the entity's kind.
        key: join key to value of one entity; empty for all entities.
        features: names; none for all.
        settings: the installation.

    Returns:
        View to the number of entities of which something was removed.

    Raises:
        ConfigurationError: no view is meant, a view has other keys or no such feature, or the
            online store keeps no origins.
        DataContractError: the key has a value that cannot be one.
    """
    feast = open_store(settings.features_home, settings.feature_repo)
    provider = _provider(feast)
    views = _meant(feast, names, key, features)
    subject = {"views": sorted(views), "features": sorted(features)}
    found: dict[str, int] = {}
    with provider.recorded("forget", subject, entities="one" if key else "all"):
        for name, view in views.items():
            meant = Removal(keys=[_packed(view, key)] if key else None, features=features or None)
            found[name] = max(
                provider.online_store.remove_values(feast.config, each, meant)
                for each in _versions(feast, view)
            )
    return found


def forget_entities(theirs: Theirs, settings: Settings, *, count_only: bool) -> dict[str, int]:
    """Remove all values online of erased entities, also of keys of which theirs is a part.

    Args:
        theirs: tells them.
        settings: the installation.
        count_only: remove nothing.

    Returns:
        View to the number of entities that had values; without those that had none.

    Raises:
        ConfigurationError: the online store cannot say which entities it holds.
        TransientError: it does not answer.
    """
    if not (settings.features_home / "feast").exists():
        return {}
    feast = open_store(settings.features_home, settings.feature_repo)
    views = [v for v in feast.list_feature_views() if v.online and theirs.columns(v.join_keys)]
    if not views:
        return {}
    provider, found = _provider(feast), dict[str, int]()
    subject = {"views": sorted(view.name for view in views)}
    with nullcontext() if count_only else provider.recorded("forget", subject, entities="one"):
        for view in views:
            for each in _versions(feast, view):
                keys = [*provider.online_store.entity_keys(feast.config, each)]
                mask = theirs.rows(pa.Table.from_pylist([*map(spelled_key, keys)]))
                chosen = [key for key, is_meant in zip(keys, mask, strict=True) if is_meant]
                if not count_only:
                    provider.online_store.remove_values(feast.config, each, Removal(keys=chosen))
                found[view.name] = max(found.get(view.name, 0), len(chosen))
    return {name: num for name, num in found.items() if num}


def spelled_key(key: bytes) -> dict[str, str]:
    """Join keys of a serialized entity key and their values."""
    return {name: str(value) for name, value in key_values(key).items()}


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


def _packed(view: FeatureView, key: Mapping[str, str]) -> bytes:
    kinds = {column.name: column.dtype.to_value_type() for column in view.entity_columns}
    names = tuple(sorted(kinds))
    group = KeyGroup(names, names, tuple(kinds[name] for name in names), views=(), cells=())
    values = tuple(key[name] for name in names)
    return group.encoder()(values if len(values) > 1 else values[0])


def _versions(feast: FeatureStore, view: FeatureView) -> list[FeatureView]:
    """The view at all numbers under which values may be online."""
    found = [
        feast.registry.get_feature_view_by_version(view.name, feast.project, number)
        for number in versions.view_versions(feast, view.name)
        if number != (view.current_version_number or 0)
    ]
    return [view, *(version for version in found if isinstance(version, FeatureView))]
