"""Copies of databases while others write: SQLite as a file, PostgreSQL row by row."""

import hashlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tasks.kernel.errors import ConfigurationError, StorageError
from tasks.kernel.files import shows_damage
from tasks.kernel.settings import Settings
from tasks.kernel.values import in_utc
from tasks.metadata.database import insert_if_absent, open_database, transaction
from tasks.metadata.identity import new_name
from tasks.metadata.tables import VERSION_TABLE, identities, metadata

OPERATION, MLFLOW = "operation/operation.db", "mlflow/mlflow.db"
VERSIONS = {VERSION_TABLE, "alembic_version"}
MAGIC = b"SQLite format 3\0"
NUM_ROWS = 1000
Prepare = Callable[[str], None]
"""Makes the tables of an address; of MLflow's database its own room knows how."""
Counts = dict[str, tuple[int, str]]
"""Rows of each table, and a digest of them that does not depend on their order."""


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy an SQLite database as it is at one moment; writers go on.

    Raises:
        StorageError: it is damaged, or busy for a minute, or the target cannot be written.
    """
    try:
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=60)) as old,
            closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as exc:
        if not shows_damage(exc):
            raise StorageError(
                f"{source} cannot be copied to {target.parent} ({exc}); expected space and leave "
                "to write there. Mend that, or set TMPDIR, and run again. No backup was made"
            ) from exc
        raise StorageError(
            f"{source} cannot be copied ({exc}); expected a whole SQLite database. Nothing was "
            "changed; `falaj doctor` examines it, `falaj restore` brings an earlier one"
        ) from exc


def servers(settings: Settings) -> dict[str, str]:
    """Addresses of the databases that are not files of the state folder, by their names there."""
    if settings.database_url is None:
        return {}
    address = sa.make_url(settings.database_url).set(drivername="postgresql+psycopg")
    shown = address.render_as_string(hide_password=False)
    return {OPERATION: shown, MLFLOW: settings.mlflow_uri}


def name_of_state(settings: Settings) -> str:
    """Name that the database of a state has for good, also restored or moved; empty without one."""
    if settings.database_url is None and not settings.metadata_file.exists():
        return ""
    url = servers(settings).get(OPERATION, settings.metadata_url)
    with transaction(sa.create_engine(url, poolclass=sa.NullPool)) as connection:
        if not sa.inspect(connection).has_table(identities.name):  # of an earlier release
            return ""
        insert_if_absent(connection, identities, number=1, identity=new_name(settings.home))
        return str(connection.execute(sa.select(identities.c.identity)).scalar_one())


def is_empty(settings: Settings) -> bool:
    """Whether the databases of a server hold no rows of ours.

    Raises:
        StorageError: they do not answer, or refuse to make a table.
    """
    for name, url in servers(settings).items():
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        try:
            with engine.begin() as connection:
                connection.execute(sa.text("CREATE TEMPORARY TABLE falaj_probe (n integer)"))
                there = {*sa.inspect(connection).get_table_names()}
                ours = {*metadata.tables} if name == OPERATION else {"registered_models", "runs"}
                for table in sorted(there & ours):
                    if connection.execute(sa.select(sa.exists(sa.table(table).select()))).scalar():
                        return False
        except sa.exc.DBAPIError as exc:
            reason = str(exc.orig).strip().splitlines()[0]
            raise StorageError(
                f"{engine.url.difference_update_query(['options'])}: {reason}; expected a database "
                "that answers and in which tables can be made. Nothing was changed"
            ) from exc
    return True


def dump(name: str, url: str, target: Path, prepare: Mapping[str, Prepare]) -> Counts:
    """Copy a server's database into a new SQLite file, as it is at one moment."""
    prepare[name](f"sqlite:///{target}")
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    engine = engine.execution_options(isolation_level="REPEATABLE READ")
    return _copy(engine, sa.create_engine(f"sqlite:///{target}", poolclass=sa.NullPool), name)


def load(name: str, source: Path, url: str, prepare: Mapping[str, Prepare]) -> Counts:
    """Copy an SQLite file's rows into a server's database, in one transaction, and compare them."""
    if name == OPERATION:  # of an earlier release
        open_database(f"sqlite:///{source}").dispose()
    prepare[name](url)
    old, new = (sa.create_engine(u, poolclass=sa.NullPool) for u in (f"sqlite:///{source}", url))
    return _copy(old, new, name)


def _copy(source: sa.Engine, target: sa.Engine, name: str) -> Counts:
    only = [*metadata.tables, VERSION_TABLE] if name == OPERATION else None
    with source.connect() as old, target.begin() as new:
        left, right = sa.MetaData(), sa.MetaData()
        left.reflect(old, only=only)
        right.reflect(new, only=only)
        _check_versions(old, new, left, name)
        tables = [table for table in right.sorted_tables if table.name not in VERSIONS]
        for table in reversed(tables):
            new.execute(table.delete())
        counts = {table.name: _copy_table(old, new, left, table) for table in tables}
        for table in tables:
            seen = _digest(new, table, table)
            if seen != counts[table.name]:
                raise StorageError(
                    f"table {table.name}: {seen[0]} rows arrived, expected {counts[table.name][0]} "
                    "that are equal. Nothing was changed in the target; run again"
                )
    return counts


def _check_versions(old: sa.Connection, new: sa.Connection, left: sa.MetaData, name: str) -> None:
    table = sa.table(next(iter(VERSIONS & {*left.tables})), sa.column("version_num"))
    was, now = (each.execute(sa.select(table)).scalar_one() for each in (old, new))
    if was != now:
        raise ConfigurationError(
            f"{name} has tables of version {was}, this release makes {now}. Nothing was changed; "
            "use the release that wrote it"
        )


def _copy_table(
    old: sa.Connection, new: sa.Connection, left: sa.MetaData, table: sa.Table
) -> tuple[int, str]:
    source = left.tables[table.name]
    query = sa.select(*(source.c[column.name] for column in table.c))
    zoned = {c.name for c in table.c if getattr(c.type, "timezone", False)}
    for rows in old.execute(query).mappings().partitions(NUM_ROWS):
        fitting = [{n: _moment(v, zoned=n in zoned) for n, v in row.items()} for row in rows]
        new.execute(table.insert(), fitting)
    for column in table.primary_key if new.dialect.name == "postgresql" else ():
        counter = new.execute(
            sa.text("SELECT pg_get_serial_sequence(:table, :column)"),
            {"table": f'"{table.name}"', "column": column.name},
        ).scalar()
        if counter and (highest := new.execute(sa.select(sa.func.max(column))).scalar()):
            new.execute(sa.select(sa.func.setval(counter, highest)))
    return _digest(old, source, table)


def _moment(value: Any, *, zoned: bool) -> Any:
    """A moment as the other database keeps it: in UTC, with or without a zone."""
    if not isinstance(value, datetime):
        return value
    return in_utc(value) if zoned else in_utc(value).replace(tzinfo=None)


def _digest(connection: sa.Connection, table: sa.Table, columns: sa.Table) -> tuple[int, str]:
    total = count = 0
    for row in connection.execute(sa.select(*(table.c[c.name] for c in columns.c))):
        plain = repr([_plain(value) for value in row]).encode()
        total = (total + int.from_bytes(hashlib.sha256(plain).digest())) % 2**256
        count += 1
    return count, f"{total:064x}"


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return bytes(value) if isinstance(value, memoryview) else _moment(value, zoned=False)


def all_text(settings: Settings) -> Iterator[str]:
    """Every text in the databases of operation and of MLflow."""
    files = {name: f"sqlite:///{settings.home / name}" for name in (OPERATION, MLFLOW)}
    there = {name: url for name, url in files.items() if (settings.home / name).exists()}
    for url in (servers(settings) or there).values():
        tables = sa.MetaData()
        with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
            tables.reflect(connection)
            for table in tables.tables.values():
                for row in connection.execute(sa.select(table)):
                    yield "\n".join(value for value in row if isinstance(value, str))
