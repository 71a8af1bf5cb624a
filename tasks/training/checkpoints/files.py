"""Single files that rank 0 leaves at the end of a run: written aside, flushed and renamed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.files import flush_to_disk


def serialized(state: Mapping[str, Any]) -> bytes:
    """The bytes of a file of `torch.save`.

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
