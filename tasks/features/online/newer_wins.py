"""Which value may replace which online, and which times are refused: one set for all stores.

Of two values of an entity in a view the one of the newer event time stays; of one event time the
one created later; of those the one pushed last, or of the materialization that began last.

What a materialization writes is a copy of the view's table. A later one has read the table again:
up to the end of its window it replaces, and removes, whatever an earlier one left there, also by an
older event time. So each value carries its origin: when the materialization that wrote it began, 0
for a pushed one. A value without an origin was written by Feast's own store or by an earlier
version of this one; it counts as pushed, but a rebuild of the view removes what is left of them.

`NewerWinsOnlineStore` is what the SQLite and the Redis store of this project share. Both are
plug-ins by Feast's own extension point, and keep Feast's layout, which its own stores can read.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from feast import StreamFeatureView
from feast.feature_view import FeatureView
from feast.infra.key_encoding_utils import serialize_entity_key
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.repo_config import RepoConfig

from tasks.features.config import CLOCK_SKEW, LONGEST_LAG
from tasks.features.online.encoding import BINARY, NO_TIME, EncodedColumn, EncodedRows
from tasks.kernel.errors import FeatureStoreError, WindowError
from tasks.kernel.values import in_utc

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Origin:
    """What writes values.

    Attributes:
        began_us: when the materialization began; 0 for a push.
        end_us: last event time of its window; until then the table is right.
    """

    began_us: int = 0
    end_us: int = 0


PUSHED = Origin()
_ORIGIN: ContextVar[Origin] = ContextVar("falaj_origin", default=PUSHED)
"""Of the rows that Feast hands over to be written."""


@contextmanager
def written_by(origin: Origin) -> Iterator[None]:
    """Rows that Feast's own code writes inside the block are of this origin, not pushed."""
    token = _ORIGIN.set(origin)
    try:
        yield
    finally:
        _ORIGIN.reset(token)


def micros(moment: datetime) -> int:
    """Microseconds since 1970; a time without a zone is UTC, as in Feast."""
    return (in_utc(moment) - EPOCH) // timedelta(microseconds=1)


def checked(view: str, batches: Iterable[EncodedRows]) -> Iterator[EncodedRows]:
    """The batches, each without a time in the future: newer values would be held back by it.

    Raises:
        WindowError: an event time or a `created` lies in the future.
    """
    for rows in batches:
        now = micros(datetime.now(UTC))
        events = ("event time", rows.events_us, CLOCK_SKEW)
        for name, moments_us, ahead in (events, ("created", rows.created_us, LONGEST_LAG)):
            newest_us = 0 if moments_us is None else int(moments_us.max(initial=0))
            if newest_us > now + ahead // timedelta(microseconds=1):
                raise WindowError(
                    f"feature view {view}: {name} reaches {_shown(newest_us)}, more than {ahead} "
                    f"ahead of now, {_shown(now)}. Correct the source. Nothing of this batch was "
                    "written"
                )
        yield rows


def _shown(moment_us: int) -> str:
    try:
        return f"{EPOCH + timedelta(microseconds=moment_us):%Y-%m-%dT%H:%M:%SZ}"
    except OverflowError:
        return f"{moment_us} us after 1970"


def check_without_function(view: FeatureView) -> None:
    """Refuse a view whose function Feast would call online only: history gives what it is made of.

    Raises:
        FeatureStoreError: it has one, and no stream whose output is its table.
    """
    function = getattr(view, "feature_transformation", None)
    if function is not None and not isinstance(view, StreamFeatureView):
        raise FeatureStoreError(
            f"feature view {view.name} transforms its rows by a function, which would be called "
            "for online values and not for training; expected a view of finished columns. Compute "
            "them in the query of its table. Nothing was read or written"
        )


def check_pushed(view: FeatureView, rows: pd.DataFrame | pa.Table) -> None:
    """Refuse pushed rows whose times are missing, have no time zone or lie in the future.

    Raises:
        WindowError: a time cannot be.
    """
    source = getattr(view, "batch_source", None)
    if source is None:  # computed by Feast at this moment
        return
    pushed = {new: old for old, new in source.field_mapping.items()}
    latest = datetime.now(UTC) + CLOCK_SKEW
    for field in filter(None, (source.timestamp_field, source.created_timestamp_column)):
        name = pushed.get(field, field)
        if wrong := _wrong_moment(rows, name, latest):
            raise WindowError(
                f"feature view {view.name}: column {name} of the pushed rows {wrong}; expected in "
                f"each row a time with a time zone, not after {latest:%Y-%m-%dT%H:%MZ}. Nothing "
                "was written"
            )


def _wrong_moment(rows: pd.DataFrame | pa.Table, name: str, latest: datetime) -> str | None:
    """What is wrong with a column of times, which may also be text, as it comes over HTTP."""
    if name not in (rows.columns if isinstance(rows, pd.DataFrame) else rows.column_names):
        return "is missing"
    values = rows[name] if isinstance(rows, pd.DataFrame) else rows.select([name]).to_pandas()[name]
    try:
        moments = [value if hasattr(value, "tzinfo") else pd.Timestamp(value) for value in values]
    except (ValueError, TypeError):
        return "holds something that is no time"
    if any(moment is pd.NaT for moment in moments):  # a null, or text that says so
        return "has a null"
    if any(moment.tzinfo is None for moment in moments):
        return "has a time without a time zone"
    newest = max(moments, default=latest)
    return f"reaches {newest.isoformat()}" if newest > latest else None


Extent = Literal["all", "unknown", "not of the table", "left behind"]
"""Values to remove: every one, those without an origin, those and the pushed ones, or those that an
earlier materialization wrote into the window of a later one."""


@dataclass(frozen=True)
class Removal:
    """Values of one view that are meant.

    Attributes:
        extent: which values.
        window: of what is left behind: moment at which the later materialization began, first and
            last event time, in microseconds since 1970.
        count_only: remove nothing.
        keys: serialized entity keys; None for all.
        features: names; None for all.
    """

    extent: Extent = "all"
    window: tuple[int, int, int] = (0, 0, 0)
    count_only: bool = False
    keys: Sequence[bytes] | None = None
    features: Sequence[str] | None = None


EVERYTHING = Removal()
FeastRow = tuple[EntityKey, dict[str, Value], datetime, datetime | None]


class NewerWinsOnlineStore:
    """A store in which the values of an entity in a view change together, and never get older."""

    def write_rows(
        self,
        config: RepoConfig,
        table: FeatureView,
        batches: Iterable[EncodedRows],
        origin: Origin = PUSHED,
    ) -> int:
        """Write encoded rows, an entity never in part; older ones are passed over.

        Returns:
            Entities that got new values; the others had newer ones.

        Raises:
            WindowError: a time lies in the future.
            TransientError: the store did not answer or was held by another process for too long.
            FeatureStoreError: it refused the write. Others as the store says.
        """
        raise NotImplementedError

    def remove_values(
        self, config: RepoConfig, table: FeatureView, meant: Removal = EVERYTHING
    ) -> int:
        """Remove the values of a view that are meant; return how many entities had one."""
        raise NotImplementedError

    def entity_keys(self, config: RepoConfig, table: FeatureView) -> Iterator[bytes]:
        """Serialized keys of all entities that may have values of a view."""
        raise NotImplementedError

    def online_write_batch(
        self,
        config: RepoConfig,
        table: FeatureView,
        data: list[FeastRow],
        progress: Callable[[int], Any] | None,
    ) -> None:
        """Write the rows whose times are not older than what is stored for their entity.

        Raises:
            WindowError: a time lies in the future. Others as for `write_rows`.
        """
        by_features: dict[tuple[str, ...], list[FeastRow]] = {}
        for row in data:
            by_features.setdefault(tuple(row[1]), []).append(row)
        batches = [_as_columns(rows, names) for names, rows in by_features.items()]
        self.write_rows(config, table, batches, _ORIGIN.get())
        if progress:
            progress(len(data))

    async def online_write_batch_async(self, *arguments: Any, **options: Any) -> None:
        """As `online_write_batch`, on another thread."""
        await asyncio.to_thread(self.online_write_batch, *arguments, **options)


def _as_columns(rows: Sequence[FeastRow], features: Sequence[str]) -> EncodedRows:
    """Rows as Feast hands them over, as columns of bytes."""
    keys = [serialize_entity_key(key) for key, *_ in rows]
    created = [NO_TIME if moment is None else micros(moment) for *_, moment in rows]
    cells = {
        name: pa.array([row[1][name].SerializeToString() for row in rows], BINARY)
        for name in features
    }
    return EncodedRows(
        keys=pa.array(keys, BINARY),
        events_us=np.array([micros(event) for _, _, event, _ in rows], np.int64),
        created_us=np.array(created, np.int64),
        features={n: EncodedColumn(each, converted_by_feast=True) for n, each in cells.items()},
    )
