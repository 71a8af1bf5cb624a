"""Which files a path names, and which of them can hold rows of a window."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

import pyarrow.dataset as ds
from pyarrow import ArrowInvalid
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType

from tasks.contracts.base import TimeWindow
from tasks.features.tables.copies import inside_window
from tasks.features.tables.formats import ENDINGS, ending_of, format_of
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError, DataContractError

NUM_THREADS = 16
UNFINISHED = (".tmp", ".crc")
"""Endings of files that a writer has beside its own."""


def files_of(table: RawTable, system: FileSystem, path: str, window: TimeWindow) -> list[FileInfo]:
    """Those of a raw table's files that may hold rows of a window.

    Statistics at the ends of Parquet files say so. Rows without a time belong to every window, and
    other formats tell nothing before they are read.

    Returns:
        At least one, so that what is wrong with all of them shows.

    Raises:
        ConfigurationError: there is no file.
        DataContractError: one is no whole Parquet file.
    """

    def may_hold(info: FileInfo) -> bool:
        if format_of(info.path) != "Parquet":
            return True
        try:
            rows = ds.dataset(info.path, filesystem=system, format="parquet")
            condition = inside_window(rows.schema, table, window)
            fragments = rows.get_fragments()
            return condition is None or any(f.subset(condition).row_groups for f in fragments)
        except ArrowInvalid as exc:
            raise DataContractError(
                f"{info.path} cannot be read as a table ({str(exc)[:200]}); expected a whole "
                "Parquet file. Write it aside and rename it when it is whole"
            ) from exc

    found = named_files(system, path)
    if table.time_column is None or len(found) == 1:
        return found
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        held = list(pool.map(may_hold, found))
    return [info for info, holds in zip(found, held, strict=True) if holds] or [found[-1]]


def named_files(system: FileSystem, path: str) -> list[FileInfo]:
    """The file itself, those below a folder, or those that fit a pattern; sorted by their paths.

    In a pattern `*` and `?` stand for letters of one name, `**` for folders. Names that begin with
    a dot or an underscore, or end as a writer's unfinished files do, are passed over.

    Args:
        system: where they are.
        path: of the system.

    Raises:
        ConfigurationError: there is none, or a folder holds something else.
    """
    there = system.get_file_info(path)
    if there.type == FileType.File:
        return [there]
    fixed = path.rstrip("/")
    if there.type != FileType.Directory:
        fixed = re.split(r"[*?]", path, maxsplit=1)[0].rpartition("/")[0]
    rest = path.removeprefix(fixed).strip("/")
    deep = not rest or "/" in rest or "**" in rest
    listed = system.get_file_info(FileSelector(fixed or "/", allow_not_found=True, recursive=deep))
    fits = re.compile(_expression(rest) if rest else ".*").fullmatch
    below = {info.path.removeprefix(fixed).strip("/"): info for info in listed}
    for kind, log in {"Delta": r"_delta_log", "Iceberg": r"metadata/.*\.metadata\.json"}.items():
        if any(re.fullmatch(log, name) for name in below):
            raise ConfigurationError(
                f"{path} is a table of {kind}: its folder also holds rows that were deleted. Name "
                f"it {kind.lower()}+file:// or {kind.lower()}+s3://"
            )
    found = [
        info
        for name, info in sorted(below.items())
        if info.type == FileType.File and fits(name) and not _is_aside(name)
    ]
    if not rest:
        _check_endings(found, path)
    if not found:
        raise ConfigurationError(
            f"the uri names no file ({path}); expected a file, a folder with files, or a pattern "
            "that files fit, such as data/*.parquet"
        )
    return found


def _expression(pattern: str) -> str:
    said = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return "".join(said.get(part, re.escape(part)) for part in parts)


def _is_aside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    hidden = any(part.startswith((".", "_")) and "=" not in part for part in parts)
    return hidden or name.endswith(UNFINISHED)


def _check_endings(found: Sequence[FileInfo], folder: str) -> None:
    for info in found:
        if ending_of(info.path) not in ENDINGS and info.extension.lower() != "zip":
            raise ConfigurationError(
                f"{folder} holds {info.base_name}, which is no Parquet, CSV or JSON file; name the "
                f"others with a pattern, such as {folder.rstrip('/')}/*.parquet"
            )
