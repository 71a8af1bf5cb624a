"""What the SQLite and the Redis store of this project share: rows pushed as columns, removals.

Both are plug-ins by Feast's own extension point, keep Feast's layout, which its own stores can
read, and follow `write_rules.py`: a late or repeated write puts no stale value before readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from feast.feature_view import FeatureView
from feast.infra.key_encoding_utils import serialize_entity_key
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.repo_config import RepoConfig
from feast.value_type import ValueType

from tasks.features.online.encoding import BINARY, NO_TIME, EncodedColumn, EncodedRows
from tasks.features.online.write_rules import PUSHED, Origin, current_origin, micros

Extent = Literal["all", "unknown", "not of the table"]
"""Values to remove: every one, those without an origin, or those and the pushed ones."""

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

    def select(
        self,
        config: RepoConfig,
        table: FeatureView,
        rule: Extent | Literal["left behind"],
        window: tuple[int, int, int] = (0, 0, 0),
        *,
        remove: bool = True,
        keys: Sequence[bytes] | None = None,
        features: Sequence[str] | None = None,
    ) -> int:
        """Count entities with a value that is meant, and remove these values where asked to.

        Args:
            config: of the feature repository.
            table: view.
            rule: which values. Left behind are those that an earlier materialization wrote.
            window: of what is left behind: moment at which the later materialization began, first
                and last event time, in microseconds since 1970.
            remove: False counts only.
            keys: serialized entity keys; None for all.
            features: names; None for all.
        """
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
        version = config.entity_key_serialization_version
        batches = [self._as_columns(rows, names, version) for names, rows in by_features.items()]
        self.write_rows(config, table, batches, current_origin())
        if progress:
            progress(len(data))

    async def online_write_batch_async(
        self,
        config: RepoConfig,
        table: FeatureView,
        data: list[FeastRow],
        progress: Callable[[int], Any] | None,
    ) -> None:
        """As `online_write_batch`, on another thread."""
        await asyncio.to_thread(self.online_write_batch, config, table, data, progress)

    def count_left_behind(
        self, config: RepoConfig, table: FeatureView, start_us: int, origin: Origin
    ) -> int:
        """Entities with a value in the window that this materialization did not find any more."""
        window = (origin.began_us, start_us, origin.end_us)
        return self.select(config, table, "left behind", window, remove=False)

    def remove_left_behind(
        self, config: RepoConfig, table: FeatureView, start_us: int, origin: Origin
    ) -> None:
        """Remove what `count_left_behind` counts."""
        window = (origin.began_us, start_us, origin.end_us)
        self.select(config, table, "left behind", window)

    def remove_values(
        self,
        config: RepoConfig,
        table: FeatureView,
        keys: Sequence[bytes] | None = None,
        features: Sequence[str] | None = None,
        extent: Extent = "all",
    ) -> int:
        """Remove values of a view, as `select` does; return how many entities had one."""
        return self.select(config, table, extent, keys=keys, features=features)

    def readable(self, value: Value) -> str | None:
        """Text that the store keeps beside a pushed value."""
        return None

    def _as_columns(
        self, rows: Sequence[FeastRow], features: Sequence[str], version: int
    ) -> EncodedRows:
        """Rows as Feast hands them over, as columns of bytes; a column's source is its texts."""
        keys = [
            serialize_entity_key(key, entity_key_serialization_version=version) for key, *_ in rows
        ]
        created = [NO_TIME if moment is None else micros(moment) for *_, moment in rows]
        columns = {}
        for name in features:
            values = [row[1][name] for row in rows]
            cells = pa.array([value.SerializeToString() for value in values], BINARY)
            texts = pa.array([self.readable(value) for value in values], pa.string())
            columns[name] = EncodedColumn(cells, texts, ValueType.STRING, converted_by_feast=True)
        return EncodedRows(
            keys=pa.array(keys, BINARY),
            events_us=np.array([micros(event) for _, _, event, _ in rows], np.int64),
            created_us=np.array(created, np.int64),
            features=columns,
        )
