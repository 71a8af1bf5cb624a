"""What a full disk is, and what SQLite says of one: one rule for commands, stages and platform."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from tasks.kernel.errors import StorageError

LEAST_FREE_BYTES = 32_000_000
"""Prefect's database alone begins with some megabytes, and fails in many ways without them."""


def lack_of_space(folder: Path) -> str:
    """A sentence about a disk that is full, or nearly; nothing where it is not.

    Args:
        folder: need not exist.
    """
    there = next(each for each in (folder, *folder.parents) if each.exists())
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    if free >= LEAST_FREE_BYTES:
        return ""
    return (
        f"{folder}: {free / 1e6:.1f} MB are free on its disk, expected at least "
        f"{LEAST_FREE_BYTES / 1e6:.0f} MB. Free some space, or set FALAJ_HOME to a folder on "
        "another disk, and run again"
    )


def require_space(folder: Path) -> None:
    """Refuse to begin what cannot be written to its end.

    Raises:
        StorageError: there is too little space.
    """
    if trouble := lack_of_space(folder):
        raise StorageError(f"{trouble}; nothing was begun")


def shows_damage(exc: sqlite3.Error) -> bool:
    """True where SQLite read the file and it is no whole database.

    A full disk, a lock or a missing permission says nothing about what is in the file.
    """
    primary_code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    return primary_code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
