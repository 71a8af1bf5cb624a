"""Point-in-time joins: which source row an entity row could know of, by pandas' as-of merge.

`created` as a cut-off: a row is available from `greatest(event time, created)` on. Among the rows
available at a moment the one with the latest event time wins, so only rows that are the latest when
they become available can ever be chosen; after dropping the others, one inequality on the available
time is enough for an as-of merge.

DuckDB reads the sources and the entity rows, and writes what comes out. In between only keys and
times are in memory, 32 bytes a source row; features are gathered for one block of entity rows at a
time, and go through files of the session's folder where they are large.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from feast.data_source import DataSource
from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_NAME, FeatureView
from feast.repo_config import RepoConfig
from numpy.typing import NDArray

from tasks.features.offline.duck import sql_name
from tasks.features.offline.entities import (
    EVENT_TIME,
    EntityRows,
    Script,
    check_names,
)
from tasks.features.offline.source import between, relation, source_columns, source_name, utc_moment
from tasks.features.online.write_rules import check_without_function
from tasks.kernel.errors import FeatureStoreError, StorageError

_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
_NUMBERS = (*_WHOLE, "FLOAT", "DOUBLE", "DECIMAL")
_TEXTS = ("VARCHAR", "ENUM")
BLOCK_ROWS = 1 << 19
"""Entity rows that are matched at one time."""
HELD_TABLES = 16
"""A table of a retrieval that needs more than this part of the memory limit goes to disk."""
FILE_ROWS = 1 << 14
LONGEST_US = 2**62
NEVER = np.iinfo(np.int64).min
Integers = NDArray[np.int64]


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
    """Match every entity row with every view; return the query over the table `joined`.

    A row that is older than the TTL, its edge still valid, counts as none. Among rows of a source
    that are equal in key and both times the last one wins.

    Returns:
        A query with the entity frame's columns, the features and the number of each entity row.
    """
    for join in joins:
        _check_keys(join, entities)
    check_names([*entities.columns, *(f for j in joins for f in j.features)], "the result")
    con, moment = script.con, entities.event_time
    bounds = con.execute(
        f"SELECT min(t), max(t) FROM (SELECT {sql_name(moment)} AS t FROM entities)"
    ).fetchall()[0]
    folder = Path(con.execute("SELECT current_setting('temp_directory')").fetchall()[0][0])
    limit = (config.offline_store.memory_limit_mb << 20) // HELD_TABLES
    sources = [
        _Source.load(script, f"v{n}", join, entities, config, cut_off, bounds, folder, limit)
        for n, join in enumerate(joins)
    ]
    keys = {name: sql for source in sources for name, sql in source.asked.items()}
    asked = ", ".join([f"{sql} AS {name}" for name, sql in keys.items()])
    blocks = con.sql(f"SELECT *, {asked or 'NULL AS __none'} FROM entities").to_arrow_reader(
        BLOCK_ROWS
    )
    columns = [name for name in blocks.schema.names if not name.startswith("__v")]
    fields = [blocks.schema.field(name) for name in columns if name != "__none"]
    schema = pa.schema([*fields, *(f for source in sources for f in source.fields)])

    def joined() -> Iterable[pa.RecordBatch]:
        for block in blocks:
            moments = pc.fill_null(block[moment].cast(pa.int64()), NEVER).to_numpy()
            order = np.argsort(moments, kind="stable")
            found = [c for source in sources for c in source.features_of(block, moments, order)]
            arrays = [*(block[field.name] for field in fields), *found]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    file = folder / "joined.arrow"
    held = _held(schema, joined(), file, limit)
    # Not mapped into memory: it is read from start to end.
    con.register("joined", pads.dataset(file, format="ipc") if held is None else held)
    return "SELECT * FROM joined"


@dataclass(frozen=True)
class _Source:
    """Rows of one view's source that could be asked for, ready to be matched.

    Arrays hold one entry a row that can be chosen, in the order in which rows become available.
    """

    name: str
    ttl: timedelta | None
    asked: dict[str, str]
    """Column of a block that holds a key, to its SQL."""
    known: list[pa.Array]
    """Distinct values of each key column."""
    fields: list[pa.Field]
    features: pa.Table
    available: Integers
    keys: Integers
    events: Integers
    numbers: Integers

    @classmethod
    def load(
        cls,
        script: Script,
        name: str,
        join: ViewJoin,
        entities: EntityRows,
        config: RepoConfig,
        cut_off: bool,
        bounds: tuple[datetime | None, datetime | None],
        folder: Path,
        limit: int,
    ) -> _Source:
        """Read the rows, and drop those that are older than one already available.

        Raises:
            FeatureStoreError: a key has another type than that of the entity frame.
        """
        con, (first, last) = script.con, bounds
        # No row can be asked for where the frame has no moment.
        earliest = _earlier(first, join.ttl) if first and join.ttl else None
        rows = relation(con, join.source, config, earliest, last)
        kinds = source_columns(con, rows)
        names = join.columns(kinds)
        time, made = names[join.event_time], names[join.created] if join.created else None
        event = utc_moment(time, kinds[time], known_from=True)
        created = utc_moment(made, kinds[made], known_from=True) if made else event
        kept = [between(time, earliest, last) if last else "false"]
        kept += [f"{sql_name(names[k])} IS NOT NULL" for k in join.keys]
        if cut_off and made:
            kept.append(between(made, None, last) if last else "false")
        pairs = [
            _comparable(con, join, entities, names[theirs], kinds[names[theirs]], ours)
            for theirs, ours in join.keys.items()
        ]
        selected = [f"{theirs} AS k{n}" for n, (theirs, _) in enumerate(pairs)]
        selected += [f"{sql_name(names[f])} AS f{n}" for n, f in enumerate(join.features.values())]
        selected += [f"epoch_us({event}) AS event", f"epoch_us({created}) AS created"]
        query = f"SELECT {', '.join(selected)} FROM {rows} WHERE {' AND '.join(kept)}"
        given = ", ".join(f"{output} is f{n}" for n, output in enumerate(join.features))
        age = f"at most {join.ttl} old" if join.ttl else "however old"
        script.statements.append(f"-- newest row available at each moment, {age}: {given}\n{query}")
        reader = con.sql(query).to_arrow_reader(BLOCK_ROWS)
        file = folder / f"{name}.arrow"
        table = _held(reader.schema, reader, file, limit)
        if table is None:
            table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        columns = [table[f"k{n}"].combine_chunks() for n in range(len(pairs))]
        known = [column.unique() for column in columns]
        if math.prod(map(len, known)) > LONGEST_US:
            raise FeatureStoreError(
                f"feature view {join.name} has too many combinations of {len(known)} keys to tell "
                "them apart; make one key of them. Nothing was retrieved"
            )
        keys = _codes(columns, known, table.num_rows)
        events = table["event"].to_numpy()
        created_us = pc.fill_null(table["created"], NEVER).to_numpy()
        available = np.maximum(events, created_us) if cut_off else events
        chosen = _choosable(keys, events, created_us, available)
        return cls(
            name=name,
            ttl=join.ttl,
            asked={f"__{name}k{n}": ours for n, (_, ours) in enumerate(pairs)},
            known=known,
            fields=[
                pa.field(output, table.schema.field(f"f{n}").type)
                for n, output in enumerate(join.features)
            ],
            features=table.select([f"f{n}" for n in range(len(join.features))]),
            available=available[chosen],
            keys=keys[chosen],
            events=events,
            numbers=chosen,
        )

    def features_of(
        self, block: pa.RecordBatch, moments: Integers, order: NDArray[np.intp]
    ) -> list[pa.Array]:
        """The features that each row of a block knew; null where it knew none.

        Args:
            block: entity rows, with the columns of `asked`.
            moments: of the rows, microseconds since 1970.
            order: that puts them in the order of time.
        """
        keys = _codes([block[name] for name in self.asked], self.known, block.num_rows)
        left = pd.DataFrame({"at": moments[order], "key": keys[order]})
        right = pd.DataFrame({"at": self.available, "key": self.keys, "number": self.numbers})
        found = pd.merge_asof(left, right, on="at", by="key")["number"].fillna(-1)
        numbers = np.empty(len(order), np.int64)
        numbers[order] = found.to_numpy(np.int64)
        if self.ttl and len(self.events):
            ttl_us = min(self.ttl // timedelta(microseconds=1), LONGEST_US)
            numbers[self.events[numbers] < moments - ttl_us] = -1
        rows = pa.array(numbers, mask=numbers < 0)
        taken = [column.take(rows) for column in self.features.columns]
        return [c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for c in taken]


def _codes(columns: Sequence[pa.Array], known: Sequence[pa.Array], num_rows: int) -> Integers:
    """One number for each row's keys; -1 where one of them is null or not known."""
    codes = np.zeros(num_rows, np.int64)
    for column, values in zip(columns, known, strict=True):
        found = pc.fill_null(pc.index_in(column, value_set=values), -1)
        position = found.to_numpy(zero_copy_only=False)
        codes = np.where((codes < 0) | (position < 0), -1, codes * len(values) + position)
    return codes


def _choosable(
    keys: Integers, events: Integers, created: Integers, available: Integers
) -> NDArray[np.intp]:
    """Rows that are the newest of their key when they become available, in that order.

    A row whose creation is not known counts as the oldest of its event.
    """
    rank = np.empty(len(keys), np.int64)
    rank[np.lexsort((created, events))] = np.arange(len(keys))
    order = np.lexsort((rank, available))
    newest = pd.Series(rank[order]).groupby(keys[order]).cummax().to_numpy()
    chosen: NDArray[np.intp] = order[newest == rank[order]]
    return chosen


def _held(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], file: Path, limit: int
) -> pa.Table | None:
    """The rows in memory; None where they are more than `limit` bytes and went to the file."""
    rest, held, size = iter(batches), [], 0
    for batch in rest:
        held.append(batch)
        size += batch.nbytes
        if size > limit:
            _to_disk(schema, chain(held, rest), file)
            return None
    return pa.Table.from_batches(held, schema)


def _to_disk(schema: pa.Schema, batches: Iterable[pa.RecordBatch], file: Path) -> None:
    try:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                for start in range(0, batch.num_rows, FILE_ROWS):
                    writer.write_batch(batch.slice(start, FILE_ROWS))
    except OSError as exc:
        raise StorageError(
            f"{file.parent}: rows of a retrieval could not be written ({exc}); expected a writable "
            "folder with free space, see spill_path of the offline store. Nothing was retrieved"
        ) from exc


def _check_keys(join: ViewJoin, entities: EntityRows) -> None:
    if missing := [k for k in join.keys.values() if k not in entities.columns]:
        raise FeatureStoreError(
            f"feature view {join.name} needs column(s) {', '.join(missing)}, which the entity "
            f"frame lacks; it has {', '.join(entities.columns)}"
        )


def _comparable(
    con: duckdb.DuckDBPyConnection,
    join: ViewJoin,
    entities: EntityRows,
    theirs: str,
    kind: str,
    ours: str,
) -> tuple[str, str]:
    """SQL of a key in the source and in the entity frame, in one type; refused where none fits."""
    given, source, frame = entities.columns[ours], sql_name(theirs), sql_name(ours)
    if _family(given) == _family(kind):
        common = {"text": "VARCHAR", "number": "DOUBLE"}.get(_family(kind), kind)
        if _is_whole(given) and _is_whole(kind):
            common = "HUGEINT" if given != kind else kind
        return f"{source}::{common}", f"{frame}::{common}"
    if con.execute(f"SELECT count({frame}) FROM entities").fetchall()[0][0]:
        raise FeatureStoreError(
            f"key {ours} of the entity frame is {given}, feature view {join.name} has {kind}; give "
            "both the same type. Nothing was retrieved"
        )
    return source, f"NULL::{kind}"  # a column of nulls has no type of its own


def _is_whole(kind: str) -> bool:
    return kind.removeprefix("U") in _WHOLE


def _family(kind: str) -> str:
    plain = kind.removeprefix("U").split("(")[0]
    if plain in _NUMBERS:
        return "number"
    return "text" if plain in _TEXTS else kind


def _earlier(moment: datetime, ttl: timedelta) -> datetime | None:
    try:
        return moment - ttl
    except OverflowError:  # longer than there are years
        return None
