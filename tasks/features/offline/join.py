"""Point-in-time joins as DuckDB's ASOF joins: which source row an entity row could know of.

`created` as a cut-off: a row is available from `greatest(event time, created)` on. Among the rows
available at a moment the one with the latest event time wins, so only rows that are the latest when
they become available can ever be chosen; after dropping the others, one inequality on the available
time is enough for ASOF.

An ASOF join sorts all that it carries, so it carries no features: it finds the *number* of the
source row for every view, and the features are looked up by that number afterwards. Time and memory
then grow with the rows, not with the history, the TTL or the number of features.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb
from feast.data_source import DataSource
from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_NAME, FeatureView
from feast.repo_config import RepoConfig

from tasks.features.offline.duck import sql_name
from tasks.features.offline.entities import (
    EVENT_TIME,
    ROW,
    EntityRows,
    Script,
    check_names,
    selected,
)
from tasks.features.offline.source import between, relation, source_columns, source_name, utc_moment
from tasks.features.online.write_rules import check_without_function
from tasks.kernel.errors import FeatureStoreError

_NUMBERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE", "DECIMAL")
_TEXTS = ("VARCHAR", "ENUM")


@dataclass(frozen=True)
class ViewJoin:
    """One feature view's part of the join; columns by the names that the view knows."""

    name: str
    source: DataSource
    keys: dict[str, str]
    """Column of the view to column of the entity frame."""
    features: dict[str, str]
    """Name in the result to column of the view."""
    event_time: str
    created: str | None
    ttl: timedelta | None

    @classmethod
    def of(cls, view: FeatureView, refs: list[str], full_names: bool) -> ViewJoin:
        """The join that the references to `view` ask for.

        Raises:
            FeatureStoreError: the view lacks its keys or its source, or transforms its rows.
        """
        check_without_function(view)
        source = view.batch_source
        if source is None:
            raise FeatureStoreError(f"feature view {view.name} has no source that can be read")
        asked = view.projection.name_to_use()
        prefix = view.projection.name_alias or view.name
        wanted = [ref.split(":", 1)[1] for ref in refs if ref.split(":", 1)[0] == asked]
        keys = [c.name for c in view.entity_columns if c.name != DUMMY_ENTITY_ID]
        if not keys and view.entities not in ([], [DUMMY_ENTITY_NAME]):  # would match any row
            raise FeatureStoreError(
                f"feature view {view.name} has entities but no key columns; apply it first"
            )
        return cls(
            name=asked,
            source=source,
            keys={k: view.projection.join_key_map.get(k, k) for k in keys},
            features={f"{prefix}__{f}" if full_names else f: f for f in wanted},
            event_time=source.timestamp_field,
            created=source.created_timestamp_column or None,
            ttl=view.ttl or None,
        )

    def seen(
        self, con: duckdb.DuckDBPyConnection, config: RepoConfig, start: datetime, end: datetime
    ) -> str:
        """Query of the keys and moments of this view's rows in [start, end]."""
        rows = relation(con, self.source, config, start, end)
        kinds = source_columns(con, rows)
        columns = self.columns(kinds)
        keys = "".join(f"{sql_name(columns[k])} AS {sql_name(e)}, " for k, e in self.keys.items())
        time = columns[self.event_time]
        known = utc_moment(time, kinds[time], known_from=True)
        return (
            f"SELECT DISTINCT {keys}{known} AS {EVENT_TIME} "
            f"FROM {rows} WHERE {between(time, start, end)}"
        )

    def columns(self, present: Collection[str]) -> dict[str, str]:
        """Names that the view knows to those of the source, which may be mapped.

        Raises:
            FeatureStoreError: the source lacks one.
        """
        known = [*self.keys, *self.features.values(), self.event_time]
        known += [self.created] if self.created else []
        found = {name: source_name(self.source, name, present) for name in known}
        if missing := [name for name, column in found.items() if column is None]:
            raise FeatureStoreError(
                f"source {self.source.name} of feature view {self.name} has no column "
                f"{', '.join(missing)}; it has {', '.join(present)}"
            )
        return {name: column for name, column in found.items() if column is not None}


def join_views(
    script: Script,
    joins: Sequence[ViewJoin],
    entities: EntityRows,
    config: RepoConfig,
    cut_off: bool,
) -> str:
    """Match every entity row with every view; return the query that looks the features up.

    Makes the tables `found_<n>` (source rows that could be asked for) and `matched` (entity row to
    row of each source). A row that is older than the TTL, its edge still valid, counts as none.
    Among rows of a source that are equal in key and both times the last one wins.

    Returns:
        A query with the entity frame's columns, the features and the number of each entity row.
    """
    for join in joins:
        _check_keys(join, entities)
    check_names([*entities.columns, *(f for j in joins for f in j.features)], "the result")
    bounds = script.con.execute(
        f"SELECT min(t), max(t) FROM (SELECT {sql_name(entities.event_time)} AS t FROM entities)"
    ).fetchall()[0]
    columns, clauses = [f"e.{ROW}"], ["FROM entities AS e"]
    for number, join in enumerate(joins):
        equal = _load_source(script, number, join, entities, config, cut_off, bounds)
        moment = f"e.{sql_name(entities.event_time)}"
        fresh = f"v{number}.event >= {moment} - {_interval(join.ttl)}" if join.ttl else "true"
        columns.append(f"CASE WHEN {fresh} THEN v{number}.number END AS m{number}")
        on = " AND ".join([*equal, f"{moment} >= v{number}.available"])
        rows = _choosable(script.con, number, join, cut_off)
        clauses.append(f"ASOF LEFT JOIN ({rows}) AS v{number} ON {on}")
    script.run(f"CREATE TEMP TABLE matched AS SELECT {', '.join(columns)} {' '.join(clauses)}")
    return _look_up(joins, entities)


def _look_up(joins: Sequence[ViewJoin], entities: EntityRows) -> str:
    columns, clauses = [f"e.{ROW}", selected(entities, "e")], ["FROM entities AS e"]
    clauses.append(f"JOIN matched AS m USING ({ROW})")
    for number, join in enumerate(joins):
        columns += [
            f"v{number}.f{place} AS {sql_name(name)}" for place, name in enumerate(join.features)
        ]
        clauses.append(f"LEFT JOIN found_{number} AS v{number} ON m.m{number} = v{number}.number")
    return f"SELECT {', '.join(columns)} {' '.join(clauses)}"


def _load_source(
    script: Script,
    number: int,
    join: ViewJoin,
    entities: EntityRows,
    config: RepoConfig,
    cut_off: bool,
    bounds: tuple[datetime | None, datetime | None],
) -> list[str]:
    """Load the source rows that could be asked for; return how their keys equal the frame's."""
    first, last = bounds
    # No row can be asked for where the frame has no moment.
    earliest = _earlier(first, join.ttl) if first and join.ttl else None
    rows = relation(script.con, join.source, config, earliest, last)
    kinds = source_columns(script.con, rows)
    names = join.columns(kinds)
    time, made = names[join.event_time], names[join.created] if join.created else None
    event = utc_moment(time, kinds[time], known_from=True)
    created = utc_moment(made, kinds[made], known_from=True) if made else event
    kept = [between(time, earliest, last) if last else "false"]
    kept += [f"{sql_name(names[k])} IS NOT NULL" for k in join.keys]
    if cut_off and made:
        kept.append(between(made, None, last) if last else "false")
    columns = [f"{sql_name(names[k])} AS k{n}, " for n, k in enumerate(join.keys)]
    columns += [f"{sql_name(names[f])} AS f{n}, " for n, f in enumerate(join.features.values())]
    script.run(
        f"CREATE TEMP TABLE found_{number} AS SELECT {''.join(columns)}{event} AS event, "
        f"{created} AS created, row_number() OVER () AS number "
        f"FROM {rows} WHERE {' AND '.join(kept)}"
    )
    return [
        _equal_keys(script.con, join, entities, f"v{number}.k{n}", kinds[names[key]], ours)
        for n, (key, ours) in enumerate(join.keys.items())
    ]


def _choosable(con: duckdb.DuckDBPyConnection, number: int, join: ViewJoin, cut_off: bool) -> str:
    """Rows of one source that can be chosen, one for each key and available time."""
    keys = "".join(f"k{n}, " for n in range(len(join.keys)))
    table = f"found_{number}"
    if _has_constant_lag(con, table):
        # Rows become available in the order of their events, so none is ever passed over.
        available = "greatest(event, any_value(created))" if cut_off else "event"
        return (
            f"SELECT {keys}event, {available} AS available, max(number) AS number FROM {table} "
            f"GROUP BY {keys}event"
        )
    # A row whose creation is not known counts as the oldest of its event.
    newest = {"e": "event", "c": "coalesce(created, '-infinity'::TIMESTAMPTZ)", "n": "number"}
    rank = "{" + ", ".join(f"'{k}': {v}" for k, v in newest.items()) + "}"
    partition = f"PARTITION BY {keys.removesuffix(', ')} " if keys else ""
    in_turn = f"OVER ({partition}ORDER BY available, {', '.join(newest.values())})"
    available = "greatest(event, created)" if cut_off else "event"
    # The first step drops rows that are older than one already available, the second all but the
    # newest of those that become available together.
    return (
        f"SELECT {keys}event, available, number FROM ("
        f"SELECT * FROM (SELECT *, {available} AS available FROM {table}) "
        f"QUALIFY max({rank}) {in_turn} = {rank}) "
        f"QUALIFY lead(available) {in_turn} IS DISTINCT FROM available"
    )


def _has_constant_lag(con: duckdb.DuckDBPyConnection, table: str) -> bool:
    """True where every row was created equally long after its event."""
    lag = "epoch_us(created) - epoch_us(event)"
    return bool(
        con.execute(
            f"SELECT count(created) = count(*) AND coalesce(min({lag}) = max({lag}), true) "
            f"FROM {table}"
        ).fetchall()[0][0]
    )


def _check_keys(join: ViewJoin, entities: EntityRows) -> None:
    if missing := [k for k in join.keys.values() if k not in entities.columns]:
        raise FeatureStoreError(
            f"feature view {join.name} needs column(s) {', '.join(missing)}, which the entity "
            f"frame lacks; it has {', '.join(entities.columns)}"
        )


def _equal_keys(
    con: duckdb.DuckDBPyConnection,
    join: ViewJoin,
    entities: EntityRows,
    theirs: str,
    kind: str,
    ours: str,
) -> str:
    """The condition that a key is equal; refused where the types cannot be."""
    given = entities.columns[ours]
    if _family(given) == _family(kind):
        return f"e.{sql_name(ours)} = {theirs}"
    if con.execute(f"SELECT count({sql_name(ours)}) FROM entities").fetchall()[0][0]:
        raise FeatureStoreError(
            f"key {ours} of the entity frame is {given}, feature view {join.name} has {kind}; give "
            "both the same type. Nothing was retrieved"
        )
    return f"NULL::{kind} = {theirs}"  # a column of nulls has no type of its own


def _family(kind: str) -> str:
    plain = kind.removeprefix("U").split("(")[0]
    if plain in _NUMBERS:
        return "number"
    return "text" if plain in _TEXTS else kind


def _interval(ttl: timedelta) -> str:
    return f"to_microseconds({ttl // timedelta(microseconds=1)})"


def _earlier(moment: datetime, ttl: timedelta) -> datetime | None:
    try:
        return moment - ttl
    except OverflowError:  # longer than there are years
        return None
