"""Read from this project's SQLite online store: all views in one transaction, undecoded."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from feast import FeatureStore

from tasks.features.config import OnlineConfig
from tasks.features.offline.duck import sql_name
from tasks.features.online.backend import Breaker, OnlineBackend, Pool, Rows, chunks, key_values
from tasks.features.online.plan import KeyGroup, ReadPlan
from tasks.kernel.errors import FeatureStoreError

KEYS_PER_QUERY = 500
"""SQLite allows 32,766 parameters; statements of one size are prepared once and kept."""


@dataclass
class _OpenFile:
    """A connection, and which file it was opened on: a removed store leaves it reading a ghost."""

    connection: sqlite3.Connection
    inode: tuple[int, int]


class _ViewColumns(NamedTuple):
    """Where cells of one view's rows belong."""

    table: str
    by_feature: dict[str, int]
    time: int


class SqliteBackend(OnlineBackend):
    """One SQLite file, as `NewerWinsSqliteOnlineStore` writes it."""

    name = "sqlite"

    def __init__(self, store: FeatureStore, plan: ReadPlan, config: OnlineConfig) -> None:
        super().__init__(store, plan, config)
        path, repo = Path(store.config.online_store.path), store.config.repo_path
        self._path = (Path(repo) / path if repo else path).absolute()
        self._pool = Pool(self._open, lambda opened: opened.connection.close(), config)
        self._breaker = Breaker(f"the online store {self._path.name}", (sqlite3.OperationalError,))
        self._columns = [self._view_columns(group) for group in plan.groups]

    def fetch(self, keys: Sequence[list[Any]]) -> list[Rows]:
        """See `OnlineBackend`."""
        packed = [
            [encode(key) for key in distinct]
            for encode, distinct in zip(self._encoders, keys, strict=True)
        ]
        with self._opened() as opened:
            return self._read(opened.connection, packed)

    def moment(self, cell: int) -> int:
        """See `OnlineBackend`."""
        return cell

    def stored_keys(self, view: int, count: int) -> list[dict[str, Any]]:
        """See `OnlineBackend`; evenly spread over all keys in their order."""
        with self._opened() as opened:
            found = opened.connection.execute(
                f"SELECT DISTINCT entity_key FROM {self._table(view)} ORDER BY entity_key"
            ).fetchall()
        return [key_values(key) for (key,) in found[:: max(len(found) // count, 1)][:count]]

    def close(self) -> None:
        """See `OnlineBackend`."""
        self._pool.close()

    @contextmanager
    def _opened(self) -> Iterator[_OpenFile]:
        """The file, ready to be read; errors become ours.

        Raises:
            TransientError: it is locked, or cannot be opened.
            FeatureStoreError: it is absent, damaged, or lacks a view.
        """
        with self._breaker.attempt(), self._explained(), self._pool.lend() as opened:
            if opened.inode != self._inode():
                opened.connection.close()
                again = self._open()
                opened.connection, opened.inode = again.connection, again.inode
            yield opened

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            raise FeatureStoreError(
                f"the online store {self._path.name} does not exist; run the feature refresh. "
                "Nothing was read"
            ) from exc
        except sqlite3.OperationalError as exc:
            if "no such" in str(exc):
                raise FeatureStoreError(
                    f"the online store {self._path.name} has no table for a view of "
                    f"{self._plan.service} ({exc}); run the feature refresh. Nothing was read"
                ) from exc
            raise  # the breaker's
        except sqlite3.DatabaseError as exc:
            raise FeatureStoreError(
                f"the online store {self._path.name} is damaged or no SQLite file ({exc}); remove "
                "it and run the feature refresh. Nothing was read"
            ) from exc

    def _open(self) -> _OpenFile:
        inode = self._inode()
        connection = sqlite3.connect(
            f"{self._path.as_uri()}?mode=ro",
            uri=True,
            timeout=self._config.timeout_s,
            isolation_level=None,
            check_same_thread=False,  # lent to one thread at a time
            cached_statements=2 * KEYS_PER_QUERY,
        )
        return _OpenFile(connection, inode)

    def _inode(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_dev, found.st_ino

    def _table(self, view: int) -> str:
        return sql_name(f"{self._plan.project}_{self._plan.views[view].stored_name}")

    def _view_columns(self, group: KeyGroup) -> list[_ViewColumns]:
        return [
            _ViewColumns(
                table=self._table(position),
                by_feature={f.name: i for i, f in enumerate(group.cells) if f.view == position},
                time=len(group.cells) + number,
            )
            for number, position in enumerate(group.views)
        ]

    def _read(self, connection: sqlite3.Connection, packed: list[list[bytes]]) -> list[Rows]:
        connection.execute("BEGIN")  # what is read from here on is of one moment
        try:
            found: list[Rows] = []
            for group, views, keys in zip(self._plan.groups, self._columns, packed, strict=True):
                cells = len(group.cells) + len(views)
                rows: dict[bytes, list[Any]] = {key: [None] * cells for key in keys}
                for view in views:
                    _fill(connection, view, keys, rows)
                found.append([*map(rows.__getitem__, keys)])
            return found
        finally:
            if connection.in_transaction:
                connection.execute("COMMIT")


def _fill(
    connection: sqlite3.Connection,
    view: _ViewColumns,
    keys: list[bytes],
    rows: dict[bytes, list[Any]],
) -> None:
    """Put the cells of one view into the rows of their keys."""
    for batch in chunks(keys, KEYS_PER_QUERY):
        for key, feature, value, moment in connection.execute(
            f"SELECT entity_key, feature_name, value, event_us FROM {view.table} "
            f"WHERE entity_key IN ({','.join('?' * len(batch))})",
            batch,
        ):
            column = view.by_feature.get(feature)
            if column is not None:
                row = rows[key]
                row[column] = value
                # Features of one write share its time; after a partial one the oldest counts.
                known = row[view.time]
                row[view.time] = moment if known is None or moment < known else known
