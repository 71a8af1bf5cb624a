"""Tables of Delta Lake and Apache Iceberg: the newest version, or one that the uri names.

Whichever is read is pinned: the state that landing records is the table's identity and version, and
what other writers add meanwhile is in the next one.
"""

import hashlib
import re
from datetime import UTC
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import SourceFile
from tasks.features.tables import copies
from tasks.features.tables.formats import check_present, near, own_names, plain_type
from tasks.features.tables.raw_files import RawTable
from tasks.features.tables.remote import ANSWER_S, CONNECT_S, s3_endpoint
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.tenants import check_own

PASSING = re.compile(
    r"connect|timed? ?out|timeout|NETWORK|dns|\b50[0234]\b|slow ?down", re.IGNORECASE
)


ADVICE = (
    "expected a table that is there, in a version that is there, with the credentials of its "
    "storage in the environment"
)


def delta_source(table: RawTable, repo: Path, window: TimeWindow, scratch: Path) -> copies.Source:
    """A table of Delta Lake, `delta+file://folder` or `delta+s3://bucket/prefix`, maybe `@version`.

    Raises:
        ConfigurationError: the library is not installed, or there is no such table or version.
        TransientError: S3 does not answer.
    """
    delta = copies.library("deltalake", "lake", table)
    where, version = _where_and_version(table, repo, "delta+")
    endpoint = s3_endpoint() if where.startswith("s3://") else None
    options = {"timeout": f"{ANSWER_S:.0f}s", "connect_timeout": f"{CONNECT_S:.0f}s"}
    if endpoint:
        options |= {"aws_endpoint": endpoint, "allow_http": "true"}  # http passed on loopback alone
    explained = partial(copies.source_explained, table, "Delta Lake", Exception, PASSING, ADVICE)
    with explained():
        found = delta.DeltaTable(where, version=version, storage_options=options)
        rows = found.to_pyarrow_dataset()

    def bring() -> list[Path]:
        with explained():
            return [copies.copy_window(rows, table, window, scratch / "rows.parquet")]

    held = rows.get_fragments(copies.inside_window(rows.schema, table, window))
    files = pa.table(found.get_add_actions(flatten=True)).to_pydict()
    # The paths are quoted once more than the fragments' are.
    sizes = dict(zip(map(unquote, files["path"]), files["size_bytes"], strict=True))
    num_bytes = sum(sizes[fragment.path] for fragment in held)
    return copies.Source(_pinned(table, found.metadata().id, found.version(), num_bytes), bring)


def iceberg_source(table: RawTable, repo: Path, window: TimeWindow, scratch: Path) -> copies.Source:
    """A table of Iceberg, maybe `@snapshot`.

    `iceberg+catalog://name/namespace.table` is one of a catalog that pyiceberg's own settings
    describe (`PYICEBERG_CATALOG__NAME__URI` ...); `iceberg+file://` and `iceberg+s3://` name a
    `.metadata.json`, or a folder with a version hint.

    Raises:
        ConfigurationError: the library is not installed, or there is no such table or snapshot.
        TransientError: the catalog or S3 does not answer.
    """
    catalogs, config, conditions, tables = (
        copies.library(f"pyiceberg.{name}", "lake", table)
        for name in ("catalog", "utils.config", "expressions", "table")
    )
    where, snapshot = _where_and_version(table, repo, "iceberg+")
    endpoint = s3_endpoint()
    storage = {"s3.endpoint": endpoint} if endpoint else {}
    explained = partial(copies.source_explained, table, "Iceberg", Exception, PASSING, ADVICE)
    with explained():
        if where.startswith("catalog://"):
            name, _, identifier = where.removeprefix("catalog://").partition("/")
            described = config.Config().get_catalog_config(name) or {}
            found = catalogs.load_catalog(name, **{**storage, **described}).load_table(identifier)
        else:
            found = tables.StaticTable.from_metadata(where, storage)
        pinned = found.snapshot_by_id(snapshot) if snapshot else found.current_snapshot()
        if pinned is None:
            raise ConfigurationError(
                f"{table.uri!r} has no snapshot {snapshot or ''}; write rows into it, or name one "
                "of its snapshots"
            )
        schema = found.scan(snapshot_id=pinned.snapshot_id).projection().as_arrow()
        own = own_names(table)
        check_present(table, schema.names, own.values(), "it")
        time = own.get(table.time_column or "", "")
        bounds = near(window, plain_type(schema, time))
        rows = conditions.AlwaysTrue()
        if bounds:
            zone = "+00:00" if bounds == window else ""
            since, until = (
                f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}{zone}"
                for moment in (bounds.start, bounds.end)
            )
            after = conditions.GreaterThanOrEqual(time, since)
            inside = conditions.And(after, conditions.LessThan(time, until))
            rows = conditions.Or(inside, conditions.IsNull(time))
        scan = found.scan(rows, tuple(own.values()) or ("*",), snapshot_id=pinned.snapshot_id)
        num_bytes = sum(each.file.file_size_in_bytes for each in scan.plan_files())

    def bring() -> list[Path]:
        with explained():
            return [copies.write_rows(scan.to_arrow_batch_reader(), scratch / "rows.parquet")]

    identity = str(found.metadata.table_uuid)
    return copies.Source(_pinned(table, identity, pinned.snapshot_id, num_bytes), bring)


def _where_and_version(table: RawTable, repo: Path, prefix: str) -> tuple[str, int | None]:
    where, version = table.uri.removeprefix(prefix), None
    if pinned := re.fullmatch(r"(.+)@v?(\d+)", where):
        where, version = pinned[1], int(pinned[2])
    if where.startswith("file://"):
        where = str((repo / where.removeprefix("file://")).resolve())
        check_own(Path(where))
    return where, version


def _pinned(table: RawTable, identity: str, version: int, num_bytes: int) -> SourceFile:
    uri = f"{re.sub(r'@v?[0-9]+$', '', table.uri)}@{version}"
    digest = hashlib.sha256(f"{identity}@{version}".encode()).hexdigest()
    return SourceFile(uri=uri, sha256=digest, num_bytes=num_bytes)
