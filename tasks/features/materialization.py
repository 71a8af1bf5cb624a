"""Materialize feature views: bring the online store up to the end of a window, under guards."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

from feast import FeatureStore, FeatureView

from tasks.contracts import FeatureTables, MaterializedView, TimeWindow
from tasks.errors import FeatureStoreError
from tasks.features.duck import duckdb_session, names, sql_text
from tasks.features.ledger import (
    VIEWS,
    definitions_digest,
    online_views,
    read_ledger,
    write_ledger,
)
from tasks.features.store import apply_definitions, open_store, quiet
from tasks.features.tables import features_folder
from tasks.settings import ArtifactStore

logger = logging.getLogger(__name__)

LATENESS = timedelta(days=1)
"""Rows may arrive this much after their window: so far back each materialization reaches again."""

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


def materialize(
    tables: FeatureTables, window: TimeWindow, home: Path, repo: Path, store: ArtifactStore
) -> tuple[MaterializedView, ...]:
    """Write each view's newest values of the window online; older values never replace newer ones.

    Watermarks move, all together, only after every view was written, so a killed run is simply done
    again. Nothing is done where this version of the tables is online up to the window's end.

    Raises:
        WindowError: the window ends in the future.
        FeatureStoreError: fewer entities are online than were to be written.
    """
    window.check_not_in_future(datetime.now(UTC))
    done = online_views(tables, window, home, repo)
    if done is not None:
        return done
    before = read_ledger(home)
    views = VIEWS.validate_python(before.get("views", []))
    present = bool(views) and (home / "feast" / "online.db").exists()
    feast = open_store(home, repo, features_folder(tables, store))
    apply_definitions(feast, home, repo, again=not present)
    # Other definitions, or an online store that is gone: write all of history, not this window.
    same = present and before["definitions"] == definitions_digest(repo)
    since = window.start - LATENESS if same or not views else BEGINNING
    # A window refreshed again also changes features after it, up to what is online already.
    until = max([window.end, *(view.watermark for view in views)])
    written = tuple(
        _materialize_view(feast, view, since, until)
        for view in sorted(feast.list_feature_views(), key=lambda v: v.name)
        if view.online
    )
    write_ledger(tables, repo, written, home)
    return written


def _materialize_view(
    feast: FeatureStore,
    view: FeatureView,
    since: datetime,
    until: datetime,
) -> MaterializedView:
    start = since if view.ttl else BEGINNING
    last = until - timedelta(microseconds=1)  # Feast's end is inside, a window's is not
    with quiet():
        feast.materialize(start, last, feature_views=[view.name])
    expected = _count_keys(feast, view, start, last)
    count = getattr(feast._get_provider().online_store, "count_entities", None)
    online = count(feast.config, view) if count else expected
    if online < expected:
        raise FeatureStoreError(
            f"feature view {view.name}: {online} entities are online, {expected} were to be "
            f"written up to {until:%Y-%m-%dT%H:%MZ}. The watermark was not moved; run again"
        )
    logger.info("materialized %s: %s entities", view.name, f"{online:,}")
    return MaterializedView(name=view.name, watermark=until, num_entities=online)


def _count_keys(feast: FeatureStore, view: FeatureView, start: datetime, last: datetime) -> int:
    offline = feast.config.offline_store
    keys = [c.name for c in view.entity_columns]
    source = view.batch_source
    folder = Path(offline.tables_path) / source.path
    with duckdb_session(
        Path(offline.spill_path), memory_limit_mb=offline.memory_limit_mb, threads=offline.threads
    ) as con:
        row = con.execute(
            f"SELECT count(*) FROM (SELECT DISTINCT {names(keys)} FROM read_parquet("
            f"{sql_text(folder / '*.parquet')}) WHERE {names([source.timestamp_field])} "
            "BETWEEN ?::TIMESTAMPTZ AND ?::TIMESTAMPTZ)",
            [start, last],
        ).fetchall()[0]
    return int(row[0])
