"""Parity: the online store gives exactly what historical retrieval gives.

Which moment makes the comparison true? Materialization up to a watermark W writes, for each key,
the row with the latest event time before W, whatever its `created`. Training retrieves a row only
from `max(event time, created)` on: the moment it was known. Asked at W itself, retrieval would not
know yet what landed minutes before W and reached the tables minutes after; asked much later it
would know rows that were not to be materialized yet. Both would be differences of the question, not
of the stores.

So each drawn entity is asked at its own moment: the first one, from the last instant before W on,
at which its newest row before W is known. There retrieval, with the created-time cut-off and the
TTL of training and over the very tables that were materialized, must give the row that the store
holds, and the store, read at the same moment under the same TTL, must give its values bit by bit.
Where every row of a view is created equally long after its event this holds for every entity. A row
that arrived so late that a newer one, at or after W, was known before it has no such moment; its
entity is counted as overtaken and not compared.

At that moment a row may be older than its view's TTL, as where a feed ended long before W: both
sides must then be blank, which says nothing about the value that is stored. Such an entity is
counted as stale and asked a second time, at the moment at which its row became known. That row is
still the newest before W, so both sides must give it. Where it became known only after its TTL, no
moment shows it. A view of which only nulls could be compared is not said to be equal: there was
nothing to compare.

Entities are drawn, seeded, from the keys that have a row before the watermark, and from those that
are online without one: of these both sides must have nothing. Compared are all features of the view
they were drawn from, through the feature service that readers get. Values are compared in the type
that the view declares; times in whole seconds, as Feast keeps them online.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from feast import FeatureService, FeatureStore, FeatureView
from feast.feature_view import DUMMY_ENTITY_ID
from feast.repo_config import RepoConfig
from feast.value_type import ValueType
from numpy.typing import NDArray

from tasks.contracts.data import FeatureTables
from tasks.features.access.store import find_service, open_store
from tasks.features.checks.report import ParityDifference, ParityReport, ViewParity
from tasks.features.config import FeatureConfig, OnlineConfig
from tasks.features.offline.join import ViewJoin
from tasks.features.offline.source import damage_explained
from tasks.features.online.answer import Freshness, OnlineAnswer
from tasks.features.online.plan import FLOATS, KeyGroup, PlannedFeature, PlannedView
from tasks.features.online.reader import OnlineReader
from tasks.features.tables.build import features_folder
from tasks.features.tables.ledger import load_ledger
from tasks.kernel.errors import FeatureStoreError, TransientError
from tasks.kernel.settings import Settings
from tasks.kernel.values import in_utc

if TYPE_CHECKING:
    import polars as pl

logger = logging.getLogger(__name__)

ENTITIES_PER_VIEW = 500
"""All where there are fewer."""
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
    reader: OnlineReader, feast: FeatureStore, watermarks: dict[str, datetime]
) -> tuple[list[DrawnEntity], list[int]]:
    """Entities to compare, in order of their views, and how many of each view were overtaken.

    Args:
        reader: of the feature service.
        feast: store whose tables are read.
        watermarks: feature view to the moment before which everything is online.

    Raises:
        FeatureStoreError: a view of the service was never materialized.
        ArtifactError: files of a table are gone or damaged.
    """
    drawn: list[DrawnEntity] = []
    overtaken = []
    for position, view in enumerate(reader.plan.views):
        watermark = watermarks.get(view.definition.name)
        if watermark is None:
            raise FeatureStoreError(
                f"feature view {view.name} of service {reader.plan.service} was never "
                "materialized; run the feature refresh. Nothing was compared"
            )
        group = next(g for g in reader.plan.groups if position in g.views)
        newest = _newest(view.definition, group, feast.config, watermark)
        found, passed = _with_rows(newest, position, view, group, watermark)
        drawn += [*found, *_without_rows(newest, reader, position, group, watermark)]
        overtaken.append(passed)
    return drawn, overtaken


def _newest(
    view: FeatureView, group: KeyGroup, config: RepoConfig, watermark: datetime
) -> pl.DataFrame:
    """For each key its row before the watermark, and what comes after it.

    Columns: the keys k0, k1 ...; event time; the moment from which that row is known; the first
    moment at which a row at or after the watermark is known.
    """
    import polars as pl

    join = ViewJoin.of(view, [], full_names=False)
    rows, names, event, created = join.read(config)
    with damage_explained(join.source):
        keys = [
            pl.col(names[key]).alias(name)
            for key, name in zip(group.join_keys, _key_names(group), strict=False)
        ]
        known = pl.max_horizontal(event, created)
        before = pl.col("event") < watermark
        is_newest = pl.col("event") == pl.col("event").filter(before).max()
        read = rows.select(*keys, event.alias("event"), known.alias("known"), one=0)
        return (
            read.filter(*(pl.col(c).is_not_null() for c in (*_key_names(group), "event")))
            .group_by(*_key_names(group), "one")
            .agg(
                pl.col("event").filter(before).max(),
                pl.col("known").filter(before & is_newest).max(),
                pl.col("known").filter(~before).min().alias("overtaken"),
            )
            .filter(pl.col("event").is_not_null())
            .sort(*_key_names(group), "one")
            .collect()
        )


def _with_rows(
    newest: pl.DataFrame, position: int, view: PlannedView, group: KeyGroup, watermark: datetime
) -> tuple[list[DrawnEntity], int]:
    """Entities that have a row, drawn by the seed, and how many of those were overtaken.

    One whose row is too old at its moment is asked a second time, at the moment at which the row
    became known: it is still the newest before the watermark, and its values can be seen.
    """
    drawn: list[DrawnEntity] = []
    passed = 0
    some = newest.sample(min(len(newest), ENTITIES_PER_VIEW), seed=SEED)
    for *key, _, event_time, known, overtaken_at in some.iter_rows():
        at = max(watermark - INSTANT, known)
        if overtaken_at is not None and overtaken_at <= at:
            passed += 1
            continue
        columns = dict(zip(group.columns, key, strict=bool(key)))
        drawn.append(DrawnEntity(position, columns, event_time, at))
        if view.ttl and known - event_time <= view.ttl < at - event_time:
            drawn.append(DrawnEntity(position, columns, event_time, known, again=True))
    return drawn, passed


def _without_rows(
    newest: pl.DataFrame, reader: OnlineReader, position: int, group: KeyGroup, watermark: datetime
) -> list[DrawnEntity]:
    """Entities that are online though no row of theirs lies before the watermark."""
    import polars as pl

    if not (names := _key_names(group)):
        return []
    stored = {
        tuple(key[column] for column in group.columns): key
        for key in reader.stored_keys(position, ENTITIES_PER_VIEW)
    }
    asked = pl.DataFrame(list(stored), {n: newest.schema[n] for n in names}, orient="row")
    held = set(asked.join(newest, on=names, how="semi").iter_rows())
    return [
        DrawnEntity(position, key, None, watermark - INSTANT)
        for values, key in stored.items()
        if values not in held
    ]


def _key_names(group: KeyGroup) -> list[str]:
    return [f"k{n}" for n, key in enumerate(group.join_keys) if key != DUMMY_ENTITY_ID]


PATIENCE_S = 30.0
"""A check is in no hurry; a server's time-out would only make it fail on a busy machine."""

MAX_EXAMPLES = 5
"""Differences of a view that are reported one by one; all are counted."""

ROW, MOMENT = "parity_row", "event_timestamp"
KEY_DTYPES = {
    ValueType.STRING: "string",
    ValueType.INT32: "Int64",
    ValueType.INT64: "Int64",
    ValueType.UNIX_TIMESTAMP: "datetime64[us, UTC]",
}


def check_parity(tables: FeatureTables, config: FeatureConfig, settings: Settings) -> ParityReport:
    """Compare a sample of entities online and offline; see the module's docstring.

    Args:
        tables: the published feature tables.
        config: the use case; its training set names the feature service.
        settings: state folder, feature repository and the store that holds the tables.

    Raises:
        FeatureStoreError: nothing is materialized; retrieval lost rows; the online store is
            damaged.
        ArtifactError: files of the tables are gone or damaged.
        TransientError: the online store is away, or holds other tables: a refresh is under way.
    """
    home = settings.features_home
    watermarks = _watermarks(tables, home)
    feast = open_store(home, settings.feature_repo, features_folder(tables, settings.store))
    service = find_service(feast, config.training_set.feature_service)
    # What is too old is blank as in training, whatever servers do; nothing is of after the moment.
    patience_s = max(config.online.timeout_s, PATIENCE_S)
    patient = OnlineConfig(clock_tolerance_s=0.0, timeout_s=patience_s)
    with closing(OnlineReader(feast, service, patient)) as reader:
        drawn, overtaken = draw_entities(reader, feast, watermarks)
        answers = _ask(reader, feast, service, drawn)
    views: list[ViewParity] = []
    examples: list[ParityDifference] = []
    for position, view in enumerate(reader.plan.views):
        differences, counts = answers.compare(position, view)
        examples += differences
        reached, passed = watermarks[view.definition.name], overtaken[position]
        views.append(ViewParity(view=view.name, watermark=reached, num_overtaken=passed, **counts))
    return _report(reader.plan.service, tables, views, examples)


def _watermarks(tables: FeatureTables, home: Path) -> dict[str, datetime]:
    ledger = load_ledger(home)
    if ledger is None:
        raise FeatureStoreError(
            "it is not known that anything is online; run the feature refresh, then compare. "
            "Nothing was compared"
        )
    if ledger.version != tables.version:
        raise TransientError(
            f"the online store holds {ledger.version[:12]}, the published feature tables are "
            f"version {tables.version[:12]}: a refresh is under way or was broken off. Run it to "
            "its end, then compare. Nothing was compared"
        )
    return {view.name: view.watermark for view in ledger.views}


def _ask(
    reader: OnlineReader, feast: FeatureStore, service: FeatureService, drawn: list[DrawnEntity]
) -> _Answers:
    kinds = reader.plan.request_columns
    numbers = list(range(len(drawn)))
    columns: dict[str, list[Any]] = {
        name: [entity.key.get(name) for entity in drawn] for name in kinds
    }
    moments = [entity.moment for entity in drawn]
    online = reader.read(columns or {ROW: numbers}, moments)
    if not drawn:
        return _Answers(drawn, online, pa.table({ROW: pa.array([], pa.int64())}))
    frame = pd.DataFrame(
        {
            name: pd.Series(values, dtype=KEY_DTYPES.get(kinds[name], "object"))
            for name, values in columns.items()
        }
    )
    frame[MOMENT] = pd.Series(moments, dtype="datetime64[us, UTC]")
    frame[ROW] = np.array(numbers, dtype=np.int64)
    job = feast.get_historical_features(
        entity_df=frame, features=service, full_feature_names=True, filter_by_created_timestamp=True
    )
    offline = job.to_arrow().sort_by(ROW)
    if offline.column(ROW).to_pylist() != numbers:
        raise FeatureStoreError(
            f"retrieval of {service.name}: {len(drawn)} rows went in, {offline.num_rows} came out; "
            "expected each once. Nothing was compared"
        )
    return _Answers(drawn, online, offline)


class _Answers(NamedTuple):
    """What was answered to the drawn entities, one row each, in their order."""

    drawn: list[DrawnEntity]
    online: OnlineAnswer
    offline: pa.Table

    def compare(
        self, position: int, view: PlannedView
    ) -> tuple[list[ParityDifference], dict[str, int]]:
        """Some differences of one view, and how many values were compared, by outcome."""
        rows = np.array([n for n, e in enumerate(self.drawn) if e.view == position], np.intp)
        firsts = np.array([n for n in rows if not self.drawn[n].again], np.intp)
        found: list[ParityDifference] = []
        differing = null = 0
        for feature in view.features if rows.size else ():
            left: Any = self.online.columns[feature.output]
            left = [left[row] for row in rows] if isinstance(left, list) else left[rows]
            right = retrieved_column(self.offline, view, feature).take(pa.array(rows))
            equal, is_null = equal_values(left, right, feature.value_type)
            differing += int((~equal).sum())
            null += int((equal & is_null).sum())
            found += [
                self._difference(view, feature, rows[at], left[at], right[at])
                for at in np.flatnonzero(~equal)[:MAX_EXAMPLES]
            ]
        return found[:MAX_EXAMPLES], {
            "num_entities": firsts.size,
            "num_values": rows.size * len(view.features),
            "num_differing": differing,
            "num_null": null,
            "num_stale": int((self.online.state[position, firsts] == Freshness.STALE).sum()),
        }

    def _difference(
        self, view: PlannedView, feature: PlannedFeature, row: int, left: Any, right: pa.Scalar
    ) -> ParityDifference:
        entity, stored = self.drawn[row], self.online.views[view.name].event_time[row]
        return ParityDifference(
            view=view.name,
            feature=feature.name,
            entity={name: str(value) for name, value in entity.key.items()},
            online=as_text(left),
            offline=as_text(right.as_py()),
            online_event_time=None if np.isnat(stored) else stored.item().replace(tzinfo=UTC),
            offline_event_time=entity.event_time,
            moment=entity.moment,
        )


def _report(
    service: str, tables: FeatureTables, views: list[ViewParity], examples: list[ParityDifference]
) -> ParityReport:
    evidence = [_evidence(view, examples) for view in views]
    result = "nothing compared"
    if any(view.num_differing for view in views):
        result = "different"
    elif any(view.num_values > view.num_null for view in views):
        result = "equal"
    logger.info("parity of %s: %s", service, result)
    return ParityReport(
        feature_service=service,
        tables_version=tables.version,
        seed=SEED,
        views=tuple(views),
        examples=tuple(examples),
        result=result,
        evidence=tuple(filter(None, evidence)),
    )


def _evidence(view: ViewParity, examples: list[ParityDifference]) -> str:
    """A sentence about a view that differs, or of which no value could be compared; else ""."""
    about = (
        f"values of {view.num_entities} entities of feature view {view.view} at "
        f"{view.watermark:%Y-%m-%dT%H:%MZ}"
    )
    if view.num_differing:
        first = next(e for e in examples if e.view == view.view)
        entity = ", ".join(f"{name} {value}" for name, value in first.entity.items())
        return (
            f"{view.num_differing} of {view.num_values} {about} differ; {first.feature} of "
            f"{entity or 'the one row'} is {first.online} online and {first.offline} offline"
        )
    if view.num_values > view.num_null:
        return ""
    return (
        f"nothing to compare: all {view.num_values} {about} are null on both sides; "
        f"{view.num_stale} entities were too old and {view.num_overtaken} overtaken"
    )


def retrieved_column(
    retrieved: pa.Table, view: PlannedView, feature: PlannedFeature
) -> pa.ChunkedArray:
    """Column of a retrieval, with full names, that holds a feature.

    Raises:
        FeatureStoreError: retrieval gave no such column.
    """
    projection = view.definition.projection
    pinned = f"{projection.name_to_use()}__{feature.name}"
    plain = f"{projection.name_alias or projection.name}__{feature.name}"
    for name in (pinned, plain):
        if name in retrieved.column_names:
            return retrieved.column(name)
    raise FeatureStoreError(
        f"retrieval gave no column {pinned}; it has {', '.join(retrieved.column_names)}. Nothing "
        "was compared"
    )


def equal_values(
    online: NDArray[Any] | Sequence[Any], offline: pa.ChunkedArray, kind: ValueType
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each row whether both values are the same, and whether both are null.

    Floats are the same when their bits are, in the type that the view declares; NaN counts as null.
    Nothing else is rounded, but moments are compared in whole seconds, as Feast keeps them online.
    """
    if kind in FLOATS:
        ours = np.ascontiguousarray(online, dtype=FLOATS[kind])
        numbers = offline.cast(pa.from_numpy_dtype(ours.dtype), safe=False)
        theirs = numbers.to_numpy(zero_copy_only=False).astype(ours.dtype)
        both_null = np.isnan(ours) & np.isnan(theirs)
        bits = f"u{ours.itemsize}"
        return (ours.view(bits) == theirs.view(bits)) | both_null, both_null
    pairs = [
        (_comparable(ours), _comparable(theirs))
        for ours, theirs in zip(online, offline.to_pylist(), strict=True)
    ]
    same = np.array([_is_same(ours, theirs) for ours, theirs in pairs], bool)
    return same, np.array([ours is None and theirs is None for ours, theirs in pairs], bool)


def as_text(value: Any) -> str | None:
    """A value for people; None for null."""
    plain = _comparable(value)
    if plain is None:
        return None
    return repr(plain) if isinstance(plain, float) else str(plain)


def _comparable(value: Any) -> Any:
    """One form for what both sides write differently."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value != value:  # NaN
        return None
    if isinstance(value, datetime):
        return in_utc(value).replace(microsecond=0)
    if isinstance(value, uuid.UUID | Decimal):
        return str(value)
    return [_comparable(item) for item in value] if isinstance(value, list | tuple) else value


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, set) and isinstance(theirs, list):
        return bool(ours == set(theirs))
    if isinstance(ours, dict) and isinstance(theirs, list):  # how Arrow gives a map
        return bool(ours == {pair[0]: pair[1] for pair in theirs})
    if isinstance(ours, dict | list) and isinstance(theirs, str):  # JSON is text offline
        try:
            return bool(ours == json.loads(theirs))
        except json.JSONDecodeError:
            return False
    return bool(ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool))
