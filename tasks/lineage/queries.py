"""Which raw tables a query of the feature repository reads, found by DuckDB's own parser."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import duckdb

from tasks.lineage.steps import Query


def queries_with_reads(
    texts: Mapping[str, str], staging: Mapping[str, str], raw: frozenset[str]
) -> dict[str, Query]:
    """Each query with the raw tables that it reads, directly or through staging queries.

    Args:
        texts: name to SQL; what DuckDB cannot parse is taken to read every raw table.
        staging: name of each staging table to its SQL.
        raw: names of the raw tables.
    """
    with duckdb.connect() as con:
        direct = {name: _tables(con, text) for name, text in staging.items()}
        return {
            name: Query(text, tuple(sorted(_reach(_tables(con, text), direct, raw))))
            for name, text in texts.items()
        }


def _tables(con: duckdb.DuckDBPyConnection, text: str) -> frozenset[str] | None:
    """Every table name in a query, those of its own `WITH` clauses too; None where it is no query.

    A `WITH` clause that bears the name of a raw table hides it, and may well read it; counting it
    as read errs on the safe side.
    """
    parsed = json.loads(con.execute("SELECT json_serialize_sql(?)", [text]).fetchall()[0][0])
    return None if parsed["error"] else frozenset(_names(parsed["statements"]))


def _names(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if tree.get("type") == "BASE_TABLE":
            yield tree["table_name"]
        for part in tree.values():
            yield from _names(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from _names(part)


def _reach(
    names: frozenset[str] | None,
    staging: Mapping[str, frozenset[str] | None],
    raw: frozenset[str],
) -> frozenset[str]:
    found: set[str] = set()
    seen: set[str] = set()
    queue: list[frozenset[str] | None] = [names]
    while queue:
        read = queue.pop()
        if read is None:
            return raw
        found |= read & raw
        queue += [staging[name] for name in read - seen if name in staging]
        seen |= read
    return frozenset(found)
