"""Folders that a process works in for a while, and what killed processes left of theirs."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from tasks.kernel.process import TOKEN, ProcessName

UNSEEN_LIMIT_S = 7 * 86_400.0


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder of this process's own, for as long as the context; only its owner may enter it.

    What killed processes left under the same parent and prefix is removed first.

    Args:
        parent: exists.
        prefix: beginning of the folder's name.
    """
    remove_abandoned(parent, prefix)
    folder = Path(mkdtemp(prefix=f"{prefix}-{ProcessName.of_this().token}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
