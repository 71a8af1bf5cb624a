"""Draw the entities of a parity check, each with the moment at which it is to be asked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
from feast import FeatureStore
from feast.feature_view import DUMMY_ENTITY_ID

from tasks.features.config import FeatureConfig
from tasks.features.offline.duck import duckdb_session, first_line, is_damage, parquet, sql_name
from tasks.features.online.plan import KeyGroup, PlannedView
from tasks.features.online.reader import OnlineReader
from tasks.kernel.errors import ArtifactError, FeatureStoreError

INSTANT = timedelta(microseconds=1)
SEED = 0
"""By which entities are drawn; reports name it."""


@dataclass(frozen=True)
class DrawnEntity:
    """One entity of one view, and the row that ought to be online.

    Attributes:
        view: position in the plan.
        key: column of a request to value.
        event_time: of its newest row before the watermark; None where it has none.
        moment: when to ask.
        again: asked before at a later moment, at which its row was too old.
    """

    view: int
    key: dict[str, Any]
    event_time: datetime | None
    moment: datetime
    again: bool = False


def draw_entities(
    reader: OnlineReader,
    feast: FeatureStore,
    watermarks: dict[str, datetime],
    config: FeatureConfig,
) -> tuple[list[DrawnEntity], list[int]]:
    """Entities to compare, in order of their views, and how many of each view were overtaken.

    Args:
        reader: of the feature service.
        feast: store whose tables are read.
        watermarks: feature view to the moment before which everything is online.
        config: how many to draw, by which seed.

    Raises:
        FeatureStoreError: a view of the service was never materialized.
        ArtifactError: files of a table are gone or damaged.
    """
    drawn: list[DrawnEntity] = []
    overtaken = []
    offline = feast.config.offline_store
    with duckdb_session(Path(offline.spill_path), memory_limit_mb=config.memory_limit_mb) as con:
        for position, view in enumerate(reader.plan.views):
            watermark = watermarks.get(view.definition.name)
            if watermark is None:
                raise FeatureStoreError(
                    f"feature view {view.name} of service {reader.plan.service} was never "
                    "materialized; run the feature refresh. Nothing was compared"
                )
            group = next(g for g in reader.plan.groups if position in g.views)
            table = (Path(offline.tables_path) / view.definition.batch_source.path).resolve()
            try:
                _read_newest(con, view, group, table, watermark)
            except duckdb.Error as exc:
                if not is_damage(exc):
                    raise
                raise ArtifactError(
                    f"the table of feature view {view.name} is damaged: {first_line(exc)}. Nothing "
                    f"was compared; put {table} back from a copy, or run the refresh of its "
                    "windows again in an empty state folder"
                ) from exc
            found, passed = _with_rows(con, position, view, group, watermark, config)
            drawn += found
            drawn += _without_rows(con, reader, position, group, watermark, config)
            overtaken.append(passed)
    return drawn, overtaken


def _read_newest(
    con: duckdb.DuckDBPyConnection,
    view: PlannedView,
    group: KeyGroup,
    table: Path,
    watermark: datetime,
) -> None:
    """Make table `newest`: for each key its row before the watermark, and what comes after it.

    Columns: the keys k0, k1 ...; event time; the moment from which that row is known; the first
    moment at which a row at or after the watermark is known.
    """
    source = view.definition.batch_source
    columns = {new: old for old, new in source.field_mapping.items()}
    event = f"{sql_name(source.timestamp_field)}::TIMESTAMPTZ"
    created = event
    if source.created_timestamp_column:
        created = f"coalesce({sql_name(source.created_timestamp_column)}::TIMESTAMPTZ, {event})"
    keys = [f"{sql_name(columns.get(k, k))} AS k{n}" for n, k in enumerate(_stored_keys(group))]
    names = _key_names(group)
    listed = "".join(f"{name}, " for name in names)
    nulls = " AND ".join(["true", *(f"{name} IS NOT NULL" for name in names)])
    grouped = f"GROUP BY {', '.join(names)}" if names else ""
    con.execute(
        f"CREATE OR REPLACE TEMP TABLE newest AS SELECT {listed}newest.event AS event, "
        "greatest(newest.event, newest.created) AS known, overtaken FROM ("
        f"SELECT {listed}max({{'event': event, 'created': created}}) "
        "FILTER (event < $watermark::TIMESTAMPTZ) AS newest, "
        "min(greatest(event, created)) FILTER (event >= $watermark::TIMESTAMPTZ) AS overtaken "
        f"FROM (SELECT {''.join(f'{k}, ' for k in keys)}{event} AS event, {created} AS created "
        f"FROM {parquet(table)}) WHERE {nulls} {grouped}) "
        "WHERE newest IS NOT NULL",
        {"watermark": watermark},
    )


def _with_rows(
    con: duckdb.DuckDBPyConnection,
    position: int,
    view: PlannedView,
    group: KeyGroup,
    watermark: datetime,
    config: FeatureConfig,
) -> tuple[list[DrawnEntity], int]:
    """Entities that have a row, drawn by the seed, and how many of those were overtaken.

    One whose row is too old at its moment is asked a second time, at the moment at which the row
    became known: it is still the newest before the watermark, and its values can be seen.
    """
    lot = "".join(f", {name}::VARCHAR" for name in _key_names(group))
    found = con.execute(
        f"SELECT * FROM newest ORDER BY md5(concat_ws(' ', {SEED}{lot})) "
        f"LIMIT {config.parity.entities_per_view}"
    ).fetchall()
    drawn: list[DrawnEntity] = []
    passed = 0
    for *key, event_time, known, overtaken_at in found:
        moment = max(watermark - INSTANT, known)
        if overtaken_at is not None and overtaken_at <= moment:
            passed += 1
            continue
        columns = dict(zip(group.columns, key, strict=bool(key)))
        drawn.append(DrawnEntity(position, columns, event_time, moment))
        if view.ttl and known - event_time <= view.ttl < moment - event_time:
            drawn.append(DrawnEntity(position, columns, event_time, known, again=True))
    return drawn, passed


def _without_rows(
    con: duckdb.DuckDBPyConnection,
    reader: OnlineReader,
    position: int,
    group: KeyGroup,
    watermark: datetime,
    config: FeatureConfig,
) -> list[DrawnEntity]:
    """Entities that are online though no row of theirs lies before the watermark."""
    names = _key_names(group)
    drawn = []
    for key in reader.stored_keys(position, config.parity.entities_per_view) if names else ():
        values = [key[column] for column in group.columns]
        found = con.execute(
            f"SELECT 1 FROM newest WHERE {' AND '.join(f'{name} = ?' for name in names)}", values
        ).fetchall()
        if not found:
            drawn.append(DrawnEntity(position, key, None, watermark - INSTANT))
    return drawn


def _stored_keys(group: KeyGroup) -> list[str]:
    return [key for key in group.join_keys if key != DUMMY_ENTITY_ID]


def _key_names(group: KeyGroup) -> list[str]:
    return [f"k{number}" for number in range(len(_stored_keys(group)))]
