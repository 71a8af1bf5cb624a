"""Where raw tables come from: what a uri names, in which state it is, and how its rows are had."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pyarrow.fs import FileInfo, LocalFileSystem

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import SourceFile
from tasks.features.tables.files import named_files, with_rows_of
from tasks.features.tables.formats import own_names, unpacked
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of


@dataclass(frozen=True)
class Source:
    """What a uri names at this moment, as far as a window needs it."""

    seen: SourceFile
    """Its state. The same state gives the same rows."""
    bring: Callable[[], Sequence[Path]]
    """Gives local files with the window's rows, and maybe others."""
    digest: Callable[[], str]
    """Looks again: differs from that of `seen` where the source has changed meanwhile."""


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
    parts = urlsplit(table.uri)
    if parts.scheme == "package":
        spec = importlib.util.find_spec(parts.netloc)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigurationError(
                f"raw table {table.name}: package {parts.netloc!r} is not installed; install it or "
                f"change the uri {table.uri!r} in the feature repository"
            )
        path = Path(spec.submodule_search_locations[0]) / parts.path.lstrip("/")
        return local_source(table, path, window, scratch)
    if parts.scheme in ("", "file"):
        return local_source(table, repo / table.uri.removeprefix("file://"), window, scratch)
    raise ConfigurationError(
        f"raw table {table.name}: cannot read {table.uri!r}; expected package://..., or the "
        "path of a CSV, zipped CSV or Parquet file"
    )


def local_source(table: RawTable, path: Path, window: TimeWindow, scratch: Path) -> Source:
    """Files of this machine: one, those of a folder, or those that fit a pattern."""
    system = LocalFileSystem()
    found = named_files(system, str(path), f"raw table {table.name}: {table.uri}")
    if table.time_column:
        found = with_rows_of(system, found, own_names(table)[table.time_column], window)
    files = [Path(info.path) for info in found]

    def digest() -> str:
        if path.is_file():
            return digest_of(path)
        return listing_digest([(str(file), digest_of(file)) for file in files])

    def bring() -> list[Path]:
        # Folders' names may be columns, so a copy keeps them.
        what = f"raw table {table.name}"
        folders = [scratch / str(n) / f.parent.relative_to("/") for n, f in enumerate(files)]
        return [unpacked(*pair, what) for pair in zip(files, folders, strict=True)]

    return Source(seen_at(table.uri, digest(), found), bring, digest)


def seen_at(uri: str, digest: str, found: Sequence[FileInfo]) -> SourceFile:
    """State of files that were listed."""
    return SourceFile(uri=uri, sha256=digest, num_bytes=sum(info.size for info in found))


def listing_digest(states: Sequence[tuple[str, str]]) -> str:
    """Digest over names and states of files, in the order of their names."""
    lines = "".join(f"{state}  {name}\n" for name, state in sorted(states))
    return hashlib.sha256(lines.encode()).hexdigest()
