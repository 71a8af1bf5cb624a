"""Rows of PostgreSQL: the declared columns of one window, in one snapshot of the database."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import pyarrow as pa

from tasks.contracts.base import TimeWindow
from tasks.features.access.profile import postgres_refusal
from tasks.features.offline.duck import names, sql_name
from tasks.features.tables.copies import Source, copied, library, source_explained, write_rows
from tasks.features.tables.formats import check_present, ends_in_sql, near, own_names
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError

CONNECT_S = 10
PLAIN = {
    *("int2", "int4", "int8", "float4", "float8", "bool", "text", "varchar", "bpchar"),
    *("timestamptz", "timestamp", "date"),
}
"""Types that come as they are; others come as PostgreSQL writes them."""
PASSING = re.compile(
    r"^(08|40|53|55|57)\w{3}: |starting up|shutting down|too many|recovery"
    r"|^\w*Error: (?!.*(FATAL|certificate|password|invalid|support SSL))"
)
"""Connection, conflict, resources, operator; and a failed connection that may help itself."""


def postgres_source(table: RawTable, repo: Path, window: TimeWindow, scratch: Path) -> Source:
    """Rows of a table, view or query, `postgres://user@host/database/schema.table`.

    They are read at once: a database has no version by which to know whether they changed.
    `FALAJ_<TABLE>_URL` replaces all of the uri but the table.

    Raises:
        ConfigurationError: the driver is not installed, the uri is wrong, or the server refuses.
        TransientError: the server does not answer.
    """
    driver = library("adbc_driver_postgresql.dbapi", "postgres", table)
    address, rows = _address_and_rows(table, repo)
    target = scratch / "rows.parquet"
    variable = f"FALAJ_{table.name.upper()}_URL"
    rights = f"correct it, or the user's rights and password (PGPASSWORD or {variable})"
    with (
        source_explained(table, "PostgreSQL", driver.Error, PASSING, rights),
        driver.connect(address) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        cursor.execute(f"SELECT * FROM {rows} LIMIT 0")
        schema = cursor.fetch_record_batch().schema
        check_present(table, schema.names, own_names(table).values(), "it")
        cursor.execute(_query(table, rows, schema, window))
        write_rows(cursor.fetch_record_batch(), target)
    return copied(table, target)


def _address_and_rows(table: RawTable, repo: Path) -> tuple[str, str]:
    """Address of the database, and what stands after FROM.

    Raises:
        ConfigurationError: one of them is missing, or rows would travel unencrypted.
    """
    parts = urlsplit(table.uri)
    database, _, name = unquote(parts.path).strip("/").partition("/")
    options = _options(parts.query)
    query = options.pop("query", "")
    if bool(name) == bool(query):
        raise ConfigurationError(
            f"{table.uri!r} names {'both' if name else 'neither'} a table and a query; expected "
            "postgres://user@host/database/schema.table, or "
            "postgres://user@host/database?query=source.sql with a file of the feature repository"
        )
    variable = f"FALAJ_{table.name.upper()}_URL"
    if given := os.environ.get(variable):
        parts = urlsplit(given)
        database = unquote(parts.path).strip("/")
        options = _options(parts.query)
    # These the driver would take from elsewhere, past the check.
    address = options.get("hostaddr") or os.environ.get("PGHOSTADDR", "")
    hosts = [host for host in (parts.hostname, options.get("host")) if host]
    if not hosts:
        raise ConfigurationError(
            f"{variable if given else table.uri!r} names no host; expected one, such as localhost"
        )
    for host in (*hosts, address):
        checked = urlencode({**options, "host": host})
        for refusal in postgres_refusal(f"postgresql:///?{checked}", "the uri"):
            raise ConfigurationError(refusal)
    options.setdefault("connect_timeout", str(CONNECT_S))
    encoded = urlencode(options, quote_via=quote)
    address = f"postgresql://{parts.netloc}/{quote(database)}?{encoded}"  # a socket has no netloc
    if name:
        return address, ".".join(map(sql_name, name.split(".")))
    file = repo / query
    if not file.is_file():
        raise ConfigurationError(
            f"the feature repository has no file {query!r} with the query of its rows; write it, "
            "or name a table"
        )
    return address, f"({file.read_text(encoding='utf-8').strip().rstrip(';')}\n) AS rows"


def _options(query: str) -> dict[str, str]:
    """As libpq reads them: a plus is a plus."""
    pairs = (part.partition("=") for part in query.split("&") if part)
    return {name: unquote(value) for name, _, value in pairs}


def _query(table: RawTable, rows: str, schema: pa.Schema, window: TimeWindow) -> str:
    own = own_names(table) or {name: name for name in schema.names}
    selected = [
        name if _type_name(schema, written) in PLAIN else f"{name}::text AS {name}"
        for written in own.values()
        for name in [sql_name(written)]
    ]
    time = own.get(table.time_column or "", "")
    bounds = near(window, schema.field(time).type) if time else None
    condition = ""
    if bounds:
        kind, column = _type_name(schema, time), sql_name(time)
        since, until = (f"{end}::{kind}" for end in ends_in_sql(bounds))
        condition = f" WHERE ({column} >= {since} AND {column} < {until}) OR {column} IS NULL"
    # In one order, so that the same rows give the same digest.
    order = names([*([time] if time else []), *(own[key] for key in table.key)]) or "1"
    return f"SELECT {', '.join(selected)} FROM {rows}{condition} ORDER BY {order}"


def _type_name(schema: pa.Schema, name: str) -> str:
    described: Any = schema.field(name).metadata or {}
    return str(described.get(b"POSTGRESQL:type", b"").decode()).strip("'")
