"""Read the features of a service online: fast, never half-updated, and honest about their age.

Feast gives whatever is stored, however old. Training never saw such values: historical retrieval
blanks what is older than a view's TTL. `OnlineReader` applies the same rule to every read, tells
the age of each view for each row, and counts. What is done with a value that is too old is a stated
policy of its view (`ViewPolicy`); blanking is the default, as it is what the model learnt from.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from feast import FeatureService, FeatureStore
from feast.infra.online_stores.redis import RedisOnlineStoreConfig
from feast.value_type import ValueType
from numpy.typing import NDArray

from tasks.features.config import OnlineConfig
from tasks.features.online import answer
from tasks.features.online.backend import FeastBackend, OnlineBackend, Rows
from tasks.features.online.newer_wins import micros
from tasks.features.online.plan import FLOATS, ReadPlan, RequestedKeys, plan_read
from tasks.features.online.redis_reader import RedisBackend
from tasks.features.online.sqlite_reader import SqliteBackend
from tasks.features.online.sqlite_store import NewerWinsSqliteOnlineStoreConfig
from tasks.kernel.errors import DataContractError, StaleFeaturesError

Request = Mapping[str, Sequence[Any]]
Moment = datetime | Sequence[datetime] | None


class OnlineReader:
    """Reads one feature service. Safe to use from many threads at once.

    The plan is made once: a reader goes on reading the definitions it was made with, also when
    others are applied. Make a new reader to follow them.

    Args:
        store: opened Feast store, for its registry and the address of its online store.
        service: what to read, as the registry knows it.
        config: policies and time-outs.
    """

    def __init__(self, store: FeatureStore, service: FeatureService, config: OnlineConfig) -> None:
        self.plan = plan_read(store, service, config)
        self._backend = open_backend(store, self.plan, config)
        self._decoder = _Decoder(self.plan, self._backend.moment)
        self._serves = np.array([view.policy.stale == "serve" for view in self.plan.views])
        self._refuses_missing = any(v.policy.missing == "refuse" for v in self.plan.views)
        ttls_us = [_ttl_us(view.ttl) for view in self.plan.views]
        self._ttl_us = np.array(ttls_us, np.int64).reshape(-1, 1)
        self._tolerance_us = round(config.clock_tolerance_s * 1e6)
        self._names = tuple(view.name for view in self.plan.views)
        self._lock = threading.Lock()
        self._counts = np.zeros((len(self._names), len(answer.LABELS)), np.int64)

    @property
    def backend(self) -> str:
        """`redis`, `sqlite`, or `feast` where Feast's own, slower read is used."""
        return self._backend.name

    def read(self, entities: Request, now: Moment = None) -> answer.OnlineAnswer:
        """Features of the requested rows, as known at `now`, named `<view>__<feature>`.

        Args:
            entities: key columns by name; other columns are ignored. A key that is null (None, NaN)
                has no features.
            now: moment at which ages count: of all rows, or one a row. None is the wall clock; a
                replay gives its own.

        Raises:
            DataContractError: a key column is absent, has another length or an impossible value.
            StaleFeaturesError: values are too old or absent, and their view's policy is `refuse`.
            TransientError: the store is away; nothing was read.
        """
        num_rows = self._check_request(entities)
        moments_us = _moments_us(now, num_rows)
        keys = [RequestedKeys(group, entities, num_rows) for group in self.plan.groups]
        found = self._backend.fetch([key.distinct for key in keys])
        values, event_us = self._decoder.decode(found, [key.row_to_key for key in keys])
        age_s = answer.age_of(moments_us, event_us)
        state = np.zeros(event_us.shape, np.uint8)
        state[event_us < moments_us - self._ttl_us] = answer.Freshness.STALE
        state[event_us > moments_us + self._tolerance_us] = answer.Freshness.AHEAD
        state[event_us == answer.NEVER] = answer.Freshness.MISSING
        cells = np.arange(len(self._names))[:, None] * len(answer.LABELS) + state
        counted = np.bincount(cells.ravel(), minlength=self._counts.size)
        with self._lock:
            self._counts += counted.reshape(self._counts.shape)
        self._apply_policies(state, values)
        return answer.OnlineAnswer(
            service=self.plan.service,
            num_rows=num_rows,
            columns=values,
            view_names=self._names,
            event_us=event_us,
            age_s=age_s,
            state=state,
            moments_us=moments_us,
        )

    def num_rows_by_state(self) -> dict[str, dict[str, int]]:
        """View to state in words to the rows that were read in it since this reader was made."""
        with self._lock:
            counts = self._counts.tolist()
        rows = (dict(zip(answer.LABELS, of_view, strict=True)) for of_view in counts)
        return dict(zip(self._names, rows, strict=True))

    def stored_keys(self, view: int, count: int) -> list[dict[str, Any]]:
        """Key columns of up to `count` entities that the store has of the plan's view `view`.

        For checks, not for serving: a store may have to look at all it holds.
        """
        group = next(group for group in self.plan.groups if view in group.views)
        columns = dict(zip(group.join_keys, group.columns, strict=True))
        return [
            {columns[name]: value for name, value in key.items()}
            for key in self._backend.stored_keys(view, count)
        ]

    def close(self) -> None:
        """Give back every connection to the store."""
        self._backend.close()

    def _check_request(self, entities: Request) -> int:
        """Number of rows."""
        needed = self.plan.request_columns
        if missing := [name for name in needed if name not in entities]:
            raise DataContractError(
                f"the request has no key column {', '.join(missing)}; it has "
                f"{', '.join(entities) or 'none'}. Nothing was read"
            )
        if single := [name for name in needed if not _is_list(entities[name])]:
            raise DataContractError(
                f"key column {single[0]} of the request is one "
                f"{type(entities[single[0]]).__name__}, expected a list of keys. Nothing was read"
            )
        lengths = {name: len(entities[name]) for name in needed or entities}
        if len(set(lengths.values())) > 1:
            raise DataContractError(
                f"the key columns of a request differ in length: {lengths}. Nothing was read"
            )
        return next(iter(lengths.values()), 0)

    def _apply_policies(self, state: NDArray[np.uint8], values: dict[str, answer.Column]) -> None:
        if not state.any():  # all fresh
            return
        if self._refuses_missing:
            missing = state == answer.Freshness.MISSING
            for view, rows in zip(self.plan.views, missing, strict=True):
                if view.policy.missing == "refuse" and rows.any():
                    raise _refusal(view.name, rows, "have no values of")
        stale = (state == answer.Freshness.STALE) | (state == answer.Freshness.AHEAD)
        for position in np.flatnonzero(stale.any(axis=1) & ~self._serves):
            view, rows = self.plan.views[position], stale[position]
            if view.policy.stale == "refuse":
                raise _refusal(view.name, rows, "have values outside the time to live of")
            for feature in view.features:
                _blank(values[feature.output], rows)


def _refusal(view: str, rows: NDArray[np.bool_], why: str) -> StaleFeaturesError:
    return StaleFeaturesError(
        f"{int(rows.sum())} of {rows.size} rows {why} feature view {view}, the first is row "
        f"{int(rows.argmax())}; its policy is to refuse them. Nothing was served; materialize the "
        "view, or set features.online.view_policies"
    )


class _Decoder:
    """Turns the cells of all key groups into columns, each row of the request its own.

    Args:
        plan: what is read.
        moment: how the back-end keeps an event time.
    """

    def __init__(self, plan: ReadPlan, moment: Callable[[Any], int]) -> None:
        self._plan, self._moment = plan, moment
        self._absent = [[None] * (len(group.cells) + len(group.views)) for group in plan.groups]
        self._others = [
            (number, column, feature.output, answer.value_decoder(feature.value_type))
            for number, group in enumerate(plan.groups)
            for column, feature in enumerate(group.cells)
            if feature.value_type not in FLOATS
        ]
        kinds = {feature.value_type for feature in plan.features}
        self._floats = [
            (answer.FloatBlock(kind), _spans(plan, kind)) for kind in FLOATS if kind in kinds
        ]
        # Written in the order of the answer; columns are filled in as they are decoded.
        self._template: dict[str, answer.Column] = {feature.output: [] for feature in plan.features}

    def decode(
        self, found: Sequence[Rows], rows_to_keys: Sequence[list[int]]
    ) -> tuple[dict[str, answer.Column], NDArray[np.int64]]:
        """Columns by name, and event times in microseconds, shape (views, rows).

        Args:
            found: cells of the distinct keys of each group.
            rows_to_keys: for each group and row of the request the position of its key.
        """
        # A last row stands for null keys, which are numbered -1.
        groups = [
            [*rows, absent] if not rows or -1 in row_to_key else rows
            for rows, absent, row_to_key in zip(found, self._absent, rows_to_keys, strict=True)
        ]
        values = self._template.copy()
        spread = [np.array(row_to_key, np.intp) for row_to_key in rows_to_keys]
        for block, spans in self._floats:
            numbers = block.decode([(groups[number], *ends) for number, ends, _ in spans])
            for (number, _, names), some in zip(spans, numbers, strict=True):
                values.update(zip(names, some[:, spread[number]], strict=True))
        for number, column, name, decode in self._others:
            cells = [decode(row[column]) for row in groups[number]]
            values[name] = [cells[key] for key in rows_to_keys[number]]
        return values, self._event_times(groups, rows_to_keys)

    def _event_times(
        self, groups: Sequence[Rows], rows_to_keys: Sequence[list[int]]
    ) -> NDArray[np.int64]:
        by_view: list[list[int]] = [[] for _ in self._plan.views]
        for group, rows, row_to_key in zip(self._plan.groups, groups, rows_to_keys, strict=True):
            columns = answer.moments(rows, len(group.cells), self._moment)
            for view, times in zip(group.views, columns, strict=True):
                by_view[view] = [times[key] for key in row_to_key]
        return np.array(by_view, np.int64)


def _spans(plan: ReadPlan, kind: ValueType) -> list[tuple[int, tuple[int, int], list[str]]]:
    """Where cells of a float type stand: group, first and last column, names in the answer."""
    spans = []
    for number, group in enumerate(plan.groups):
        kinds = [feature.value_type for feature in group.cells]
        if kind in kinds:
            first, last = kinds.index(kind), kinds.index(kind) + kinds.count(kind)
            names = [feature.output for feature in group.cells[first:last]]
            spans.append((number, (first, last), names))
    return spans


def open_backend(store: FeatureStore, plan: ReadPlan, config: OnlineConfig) -> OnlineBackend:
    """The fast way into the store's online store where there is one, else Feast's own.

    Redis Cluster and Sentinel are read through Feast: they spread or move keys, which its client
    handles. `OnlineReader.backend` names the way that was taken.
    """
    online = store.config.online_store
    if isinstance(online, RedisOnlineStoreConfig) and online.redis_type == "redis":
        return RedisBackend(store, plan, config)
    if isinstance(online, NewerWinsSqliteOnlineStoreConfig):
        return SqliteBackend(store, plan, config)
    return FeastBackend(store, plan, config)


def _is_list(column: Any) -> bool:
    """Whether it has one entry a row; a text has a length too, but is one value."""
    if isinstance(column, str | bytes | Mapping):
        return False
    try:
        len(column)
    except TypeError:
        return False
    return True


def _ttl_us(ttl: Any) -> int:
    return round(ttl.total_seconds() * 1e6) if ttl else np.iinfo(np.int64).max // 4


def _moments_us(now: Moment, num_rows: int) -> NDArray[np.int64]:
    """One moment for all rows, or one for each.

    Raises:
        DataContractError: a moment has no time zone, or there are not as many as rows.
    """
    if now is None:
        return np.array([time.time_ns() // 1000], np.int64)
    given = [now] if isinstance(now, datetime) else list(now)
    if not isinstance(now, datetime) and len(given) != num_rows:
        raise DataContractError(
            f"{len(given)} moments were given for {num_rows} rows, expected one a row. Nothing was "
            "read"
        )
    if naive := next((moment for moment in given if moment.tzinfo is None), None):
        raise DataContractError(
            f"the moment of the read, {naive}, has no time zone. Nothing was read"
        )
    return np.array([micros(moment) for moment in given], np.int64)


def _blank(column: answer.Column, rows: NDArray[np.bool_]) -> None:
    if isinstance(column, list):
        for row in np.flatnonzero(rows):
            column[row] = None
    else:
        column[rows] = np.nan
