"""Folders that a process works in for a while, and what killed processes left of theirs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.kernel.process import TOKEN, ProcessName

TMPDIR, TEMPORARY = "TMPDIR", "falaj"
UNSEEN_LIMIT_S = 7 * 86_400.0


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder of this process's own, for as long as the context; only its owner may enter it.

    What killed processes left under the same parent and prefix is removed first.

    Args:
        prefix: beginning of the folder's name.
        parent: exists; the folder of temporary files where None.
    """
    folder = new_folder(prefix, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder(prefix: str, parent: Path | None = None) -> Path:
    """As `scratch_folder`, for whoever removes it by other means."""
    parent = parent or Path(tempfile.gettempdir())
    remove_abandoned(parent, prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{ProcessName.of_this().token}-", dir=parent))


@contextmanager
def temporary_files() -> Iterator[None]:
    """Keep the temporary files of a process, of its libraries and of all it starts in one folder.

    The folder goes in the end, or with the next process that keeps its own if this one is killed.
    To be entered first: a library keeps the name of the folder that it found.
    """
    before = os.environ.get(TMPDIR), tempfile.tempdir
    with scratch_folder(TEMPORARY) as folder:
        os.environ[TMPDIR] = tempfile.tempdir = str(folder)
        try:
            yield
        finally:
            os.environ.pop(TMPDIR)
            if before[0] is not None:
                os.environ[TMPDIR] = before[0]
            tempfile.tempdir = before[1]


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's `<parent>/<prefix>-<token>-...` whose processes have ended.

    A process of another machine, boot or container cannot be seen from here; its files count as
    abandoned when nothing in them has changed for a week.
    """
    mine = ProcessName.of_this()
    name = re.compile(rf"{re.escape(prefix)}-({TOKEN})-")
    for path in parent.iterdir():
        found = name.match(path.name)
        if found and _is_abandoned(path, mine.sees_alive(found[1])):
            _remove(path)


def _is_abandoned(path: Path, is_alive: bool | None) -> bool:
    try:
        if path.lstat().st_uid != os.getuid():
            return False
        return _age_s(path) > UNSEEN_LIMIT_S if is_alive is None else not is_alive
    except FileNotFoundError:  # its owner has just removed it
        return False


def _age_s(path: Path) -> float:
    """Seconds since anything in it has changed."""
    below = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    newest: float = max(each.lstat().st_mtime for each in (path, *below))
    return time.time() - newest


def _remove(path: Path) -> None:
    with suppress(OSError):  # removed by another meanwhile
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
