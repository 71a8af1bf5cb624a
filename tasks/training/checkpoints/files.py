"""State after each epoch: written aside and renamed, with its digest beside it, by rank 0 alone."""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tasks.errors import refused_writes_explained
from tasks.settings import digest_of, flush_to_disk, write_atomically

LOGGER = logging.getLogger(__name__)
NUM_KEPT = 2

# Plain values and tensors only: what `torch.load(weights_only=True)` accepts.
State = dict[str, Any]


def serialized(state: Mapping[str, Any]) -> bytes:
    """The bytes of a checkpoint file.

    In memory first: torch reports a full disk as a RuntimeError without a reason.
    """
    content = io.BytesIO()
    torch.save(dict(state), content)
    return content.getvalue()


def write_file(path: Path, content: bytes) -> None:
    """Write a file aside, flush it to disk and rename it into place.

    Raises:
        StorageError: the disk refused the write; nothing is visible under `path`.
    """
    aside = path.with_name(f".{path.name}.aside")
    with refused_writes_explained(path):
        try:
            aside.write_bytes(content)
            flush_to_disk(aside)
            aside.replace(path)
            flush_to_disk(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def save_checkpoint(folder: Path, epoch: int, state: Mapping[str, Any]) -> None:
    """Write the state after `epoch` and drop all but the newest few. Rank 0 only.

    Raises:
        StorageError: the disk refused the write; earlier checkpoints are untouched.
    """
    content = serialized(state)
    path = checkpoint_path(folder, epoch)
    write_file(path, content)
    write_atomically(_digest_path(path), hashlib.sha256(content).hexdigest())
    for old in _epochs_present(folder)[NUM_KEPT:]:
        _digest_path(checkpoint_path(folder, old)).unlink(missing_ok=True)
        checkpoint_path(folder, old).unlink()


def newest_checkpoint(folder: Path) -> int | None:
    """Epoch of the newest complete and undamaged checkpoint; None where there is none.

    Others are passed over with a line in the log.
    """
    for epoch in _epochs_present(folder):
        path = checkpoint_path(folder, epoch)
        try:
            expected = _digest_path(path).read_text()
        except FileNotFoundError:
            LOGGER.warning("%s has no digest beside it: incomplete, passed over", path.name)
            continue
        if (seen := digest_of(path)) == expected:
            return epoch
        LOGGER.warning(
            "%s has SHA-256 %s, expected %s: damaged, passed over",
            path.name,
            seen[:12],
            expected[:12],
        )
    return None


def load_checkpoint(folder: Path, epoch: int) -> State:
    """The state after `epoch`, on the CPU; plain values and tensors, nothing is unpickled."""
    state: State = torch.load(checkpoint_path(folder, epoch), map_location="cpu", weights_only=True)
    return state


def checkpoint_path(folder: Path, epoch: int) -> Path:
    """File of the state after `epoch`."""
    return folder / f"epoch-{epoch:04d}.pt"


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _epochs_present(folder: Path) -> list[int]:
    """Epochs with a checkpoint file, whole or not, the newest first."""
    names = (re.fullmatch(r"epoch-(\d+)\.pt", path.name) for path in folder.glob("epoch-*.pt"))
    return sorted((int(name[1]) for name in names if name), reverse=True)
