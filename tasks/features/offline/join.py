"""Point-in-time joins: which source row an entity row could know of, by polars' as-of join.

`created` as a cut-off: a row is available from `greatest(event time, created)` on. Among the rows
available at a moment the one with the latest event time wins, so only rows that are the latest when
they become available can ever be chosen; after dropping the others, one inequality on the available
time is enough for an as-of join.

Entity rows come in blocks; of each source only the columns that are asked for are read, and of
these only rows that the block could know of. Rows are matched by number, and values gathered last.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from feast.data_source import DataSource
from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_NAME, FeatureView
from feast.repo_config import RepoConfig

from tasks.features.offline.source import damage_explained, moment, scan, source_name
from tasks.features.online.newer_wins import check_without_function
from tasks.kernel.errors import FeatureStoreError

if TYPE_CHECKING:
    import polars as pl

LONGEST = timedelta(days=365 * 4000)
"""A TTL beyond this never ends."""


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
            ttl=view.ttl if view.ttl and view.ttl < LONGEST else None,
        )

    @property
    def text(self) -> str:
        """What is joined, in words, for whoever keeps how a result was made."""
        keys = ", ".join(f"{theirs} = {ours}" for theirs, ours in self.keys.items()) or "no key"
        age = f"at most {self.ttl} old" if self.ttl else "however old"
        given = ", ".join(f"{output} is {column}" for output, column in self.features.items())
        created = f", known from {self.created}" if self.created else ""
        return (
            f"-- newest row of {getattr(self.source, 'path', self.source.name)} by {keys} at each "
            f"moment, of {self.event_time}{created}, {age}: {given}"
        )

    def values_at(
        self,
        asked: pl.DataFrame,
        event_time: str,
        places: pl.Series,
        config: RepoConfig,
        cut_off: bool,
    ) -> pl.DataFrame:
        """The features that each entity row could know of; null where it knew none.

        A row that is older than the TTL, its edge still valid, counts as none. Among rows of a
        source that are equal in key and both times the last one wins.

        Args:
            asked: keys and moments of entity rows, in the order of time.
            event_time: column of `asked` with the moments.
            places: which row of `asked` each row of the result is of.
            config: of the store.
            cut_off: whether a row is known only from its creation on.

        Raises:
            FeatureStoreError: the source lacks a column, or a key has another type than in `asked`.
            ArtifactError: the source cannot be read.
        """
        import polars as pl

        moments = asked[event_time]
        with damage_explained(self.source):
            known, keys = self._known(asked, moments, config, cut_off)
        numbers = [f"k{n}" for n in range(len(keys))]
        left = asked.lazy().select(*keys, pl.col(event_time).to_physical().alias("moment"))
        right = known.lazy().select(*numbers, "available", "event", pl.row_index("found"))
        found = pl.col("found")
        if self.ttl:
            oldest = pl.col("moment") - self.ttl // timedelta(microseconds=1)
            found = pl.when(pl.col("event") >= oldest).then(found)
        matched = left.join_asof(
            right,
            left_on="moment",
            right_on="available",
            by=numbers or None,
            check_sortedness=False,  # of groups it cannot be
        )
        rows = matched.select(found).collect().to_series()[places]
        return known.select(pl.col(f"f{n}").gather(rows) for n in range(len(self.features))).rename(
            {f"f{n}": output for n, output in enumerate(self.features)}
        )

    def _known(
        self, asked: pl.DataFrame, moments: pl.Series, config: RepoConfig, cut_off: bool
    ) -> tuple[pl.DataFrame, list[pl.Expr]]:
        """Rows of the source that can be chosen, as they become available; keys of `asked`.

        Columns: the keys k0, k1 ...; event, created and available in microseconds; features f0 ...
        """
        import polars as pl

        rows, names, event, created = self.read(config)
        kinds = rows.collect_schema()
        pairs = [
            (names[theirs], ours, self._common(names[theirs], kinds, asked[ours]))
            for theirs, ours in self.keys.items()
        ]
        keys = [pl.col(theirs).cast(kind) for theirs, _, kind in pairs]
        last, first = moments.max(), moments.min()
        wanted = [event <= last if last is not None else pl.lit(False)]
        wanted += [event >= first - pl.lit(self.ttl)] if self.ttl and first is not None else []
        wanted += [pl.col(names[key]).is_not_null() for key in self.keys]
        wanted += [created.is_not_null(), created <= last] if cut_off and last is not None else []
        micros = {"event": event.to_physical(), "created": created.to_physical()}
        read = rows.filter(*wanted).select(
            *(key.alias(f"k{n}") for n, key in enumerate(keys)),
            *(time.alias(name) for name, time in micros.items()),
            *(pl.col(names[c]).alias(f"f{n}") for n, c in enumerate(self.features.values())),
        )
        available = pl.max_horizontal("event", "created") if cut_off else pl.col("event")
        known = _choosable(read.with_columns(available=available).collect(), len(keys))
        return known, [pl.col(ours).cast(k).alias(f"k{n}") for n, (_, ours, k) in enumerate(pairs)]

    def read(self, config: RepoConfig) -> tuple[pl.LazyFrame, dict[str, str], pl.Expr, pl.Expr]:
        """The source; names the view knows to its own; event time; creation, or that again."""
        with damage_explained(self.source):
            rows = scan(self.source, config)
            kinds = rows.collect_schema()
        names = self.columns(kinds.names())
        event, created = (
            moment(names[time], kinds[names[time]], known_from=True)
            for time in (self.event_time, self.created or self.event_time)
        )
        return rows, names, event, created

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

    def _common(self, name: str, kinds: pl.Schema, asked: pl.Series) -> pl.DataType:
        """The type in which a key of the source and of the entity rows are compared."""
        import polars as pl

        theirs, ours = kinds[name], asked.dtype
        if theirs == ours or asked.null_count() == len(asked):
            return theirs  # a column of nulls has no type of its own
        if theirs.is_integer() and ours.is_integer():
            return pl.Int128()
        if theirs.is_numeric() and ours.is_numeric():
            return pl.Float64()
        if {type(theirs), type(ours)} <= {pl.String, pl.Categorical, pl.Enum}:
            return pl.String()
        raise FeatureStoreError(
            f"key {asked.name} of the entity frame is {ours}, feature view {self.name} has "
            f"{theirs}; give both the same type. Nothing was retrieved"
        )


def _choosable(rows: pl.DataFrame, num_keys: int) -> pl.DataFrame:
    """Rows that are the newest of their key when they become available, in that order.

    A row whose creation is not known counts as the oldest of its event.
    """
    import polars as pl

    times = ("available", "event", "created")
    if not all(rows[time].is_sorted() for time in times):
        rows = rows.sort(times, maintain_order=True)
    if rows["event"].is_sorted():  # then none is older than one that was available before
        return rows
    by_event = pl.arg_sort_by("event", "created", maintain_order=True)
    rank = rows.select(by_event.arg_sort()).to_series().alias("rank")
    newest = pl.col("rank").cum_max()
    keys = [f"k{n}" for n in range(num_keys)]
    ranked = rows.with_columns(rank)
    return ranked.filter(pl.col("rank") == (newest.over(keys) if keys else newest)).drop("rank")
