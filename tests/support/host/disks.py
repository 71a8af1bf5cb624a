"""Small disks that fill up: file systems in memory that only this process and its children see."""

import ctypes
import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_NEW_MOUNTS = 0x0002_0000
_BLOCK = 4096


@dataclass(frozen=True)
class SmallDisk:
    """A folder that holds no more than it was made for."""

    folder: Path

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Full to the last byte inside the block, whoever deletes what."""
        ballast = self.folder / "ballast"
        with ballast.open("wb") as stream:
            with suppress(OSError):
                while True:
                    os.write(stream.fileno(), b"\0" * _BLOCK)
        try:
            yield
        finally:
            ballast.unlink()

    def close(self) -> None:
        """Let nothing be written to it any more."""
        command = ["mount", "-o", "remount,ro", "tmpfs", str(self.folder)]
        subprocess.run(command, check=True)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """A disk of so many bytes at an existing, empty folder; skips where none may be made."""
    if not _has_own_mounts():
        pytest.skip("a small disk needs root and a mount namespace")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True
    )
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@functools.cache
def _has_own_mounts() -> bool:
    """From now on nobody else sees what this process mounts; the kernel removes it in the end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_NEW_MOUNTS) != 0:
        return False
    private = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True)
    return private.returncode == 0
