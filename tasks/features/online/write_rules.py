"""Which value may replace which online, and which times are refused: one set for all stores.

Of two values of an entity in a view the one of the newer event time stays; of one event time the
one created later; of those the one pushed last, or of the materialization that began last.

What a materialization writes is a copy of the view's table. A later one has read the table again:
up to the end of its window it replaces, and removes, whatever an earlier one left there, also by an
older event time. So each value carries its origin: when the materialization that wrote it began, 0
for a pushed one. A value without an origin was written by Feast's own store or by an earlier
version of this one; it counts as pushed, but a rebuild of the view removes what is left of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pandas as pd
import pyarrow as pa
from feast import StreamFeatureView
from feast.feature_view import FeatureView

from tasks.features.config import CLOCK_SKEW, LONGEST_LAG
from tasks.features.online.encoding import EncodedRows
from tasks.kernel.errors import FeatureStoreError, WindowError

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


@contextmanager
def written_by(origin: Origin) -> Iterator[None]:
    """Rows that Feast's own code writes inside the block are of this origin, not pushed."""
    token = _ORIGIN.set(origin)
    try:
        yield
    finally:
        _ORIGIN.reset(token)


def current_origin() -> Origin:
    """Origin of the rows that Feast hands over to be written."""
    return _ORIGIN.get()


def micros(moment: datetime) -> int:
    """Microseconds since 1970; a time without a zone is UTC, as in Feast."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - EPOCH) // timedelta(microseconds=1)


def checked(view: str, batches: Iterable[EncodedRows]) -> Iterator[EncodedRows]:
    """The batches, each with no time that cannot be.

    Raises:
        WindowError: an event time or a `created` lies in the future.
    """
    for rows in batches:
        if len(rows):
            created = rows.created_us
            check_newest(
                view, int(rows.events_us.max()), None if created is None else int(created.max())
            )
        yield rows


def check_newest(view: str, event_us: int, created_us: int | None) -> None:
    """Refuse a time that lies in the future: newer values would be held back by it.

    Raises:
        WindowError: the newest event time or `created` lies in the future.
    """
    now = micros(datetime.now(UTC))
    newest = (("event time", event_us, CLOCK_SKEW), ("created", created_us or 0, LONGEST_LAG))
    for name, moment_us, ahead in newest:
        if moment_us > now + ahead // timedelta(microseconds=1):
            raise WindowError(
                f"feature view {view}: {name} reaches {_shown(moment_us)}, more than {ahead} ahead "
                f"of now, {_shown(now)}. Correct the source. Nothing of this batch was written"
            )


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
    if values.isna().any():
        return "has a null"
    try:
        moments = [value if hasattr(value, "tzinfo") else pd.Timestamp(value) for value in values]
    except (ValueError, TypeError):
        return "holds something that is no time"
    if any(moment is pd.NaT for moment in moments):  # text that says so
        return "has a null"
    if any(moment.tzinfo is None for moment in moments):
        return "has a time without a time zone"
    newest = max(moments, default=latest)
    return f"reaches {newest.isoformat()}" if newest > latest else None
