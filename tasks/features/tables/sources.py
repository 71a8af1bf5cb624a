"""Where raw tables come from: what a uri names, in which state it is, and how its rows are had."""

import importlib.util
from pathlib import Path

from pyarrow.fs import LocalFileSystem

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import SourceFile
from tasks.features.tables.copies import Source, digest_of_states
from tasks.features.tables.files import files_of
from tasks.features.tables.formats import unpacked
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.tenants import check_own


def open_source(table: RawTable, repo: Path, window: TimeWindow, scratch: Path) -> Source:
    """Look up what a raw table's uri names; a package is located without being imported.

    Args:
        table: what is declared.
        repo: feature repository, to which relative paths refer.
        window: what is going to be asked for.
        scratch: a folder for copies; made where it is needed.

    Raises:
        ConfigurationError: there is no such package, file, bucket, database or table.
        TransientError: the source does not answer.
    """
    scheme, mark, rest = table.uri.partition("://")
    if not mark:
        return local_source(table, repo / table.uri, window, scratch)
    # What only some schemes need is imported with them: nothing else waits for it.
    match scheme:
        case "file":
            return local_source(table, repo / rest, window, scratch)
        case "package":
            return local_source(table, _package_path(table, rest), window, scratch)
        case "s3":
            from tasks.features.tables.remote import s3_source

            return s3_source(table, window, scratch)
        case "https" | "http":
            from tasks.features.tables.remote import http_source

            return http_source(table, scratch)
        case "postgres" | "postgresql":
            from tasks.features.tables.databases import postgres_source

            return postgres_source(table, repo, window, scratch)
        case "delta+file" | "delta+s3":
            from tasks.features.tables.lakes import delta_source

            return delta_source(table, repo, window, scratch)
        case "iceberg+catalog" | "iceberg+file" | "iceberg+s3":
            from tasks.features.tables.lakes import iceberg_source

            return iceberg_source(table, repo, window, scratch)
        case "tenant":
            from tasks.features.tables.tenants import tenant_source

            return tenant_source(table, repo, window, scratch)
    raise ConfigurationError(
        f"cannot read {table.uri!r}; expected a path, or one of package://, s3://, https://, "
        "postgres://, delta+file://, delta+s3://, iceberg+catalog://, iceberg+file://, "
        "iceberg+s3:// and tenant://"
    )


def _package_path(table: RawTable, rest: str) -> Path:
    name, _, path = rest.partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"package {name!r} is not installed; install it or change the uri {table.uri!r} in "
            "the feature repository"
        )
    return Path(spec.submodule_search_locations[0]) / path


def local_source(table: RawTable, path: Path, window: TimeWindow, scratch: Path) -> Source:
    """Files of this machine: one, those of a folder, or those that fit a pattern."""
    check_own(path)
    found = files_of(table, LocalFileSystem(), str(path), window)
    files = [Path(info.path) for info in found]
    for each in files:  # links lead anywhere
        check_own(each)

    def digest() -> str:
        if path.is_file():
            return digest_of(path)
        return digest_of_states([(str(file), digest_of(file)) for file in files])

    def bring() -> list[Path]:
        # Folders' names may be columns, so a copy keeps them.
        folders = [Path(scratch, str(n), *f.parent.parts[1:]) for n, f in enumerate(files)]
        return [unpacked(*pair) for pair in zip(files, folders, strict=True)]

    num_bytes = sum(info.size for info in found)
    return Source(SourceFile(uri=table.uri, sha256=digest(), num_bytes=num_bytes), bring, digest)
