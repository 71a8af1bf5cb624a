"""Whether a feature registry may have changed since it was read; asked often, so it must be cheap.

Reading all definitions keeps the interpreter for a tenth of a second, which every request would
feel. Feast's SQL registry notes when it was changed last, in whole seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from feast import FeatureStore
from feast.infra.registry.sql import SqlRegistry

SETTLED_S = 2
"""A change may follow another one within the same second; after so long it cannot."""

Stamp = tuple[object, ...]


def registry_stamp(store: FeatureStore) -> Stamp | None:
    """A value that changes with the registry; None where only reading it all would tell."""
    registry = store.registry
    if not isinstance(registry, SqlRegistry):
        return None
    changed = registry._get_last_updated_metadata(store.project)
    if changed is None or time.time() - changed.timestamp() < SETTLED_S:
        return None
    return (changed,)


def files_stamp(files: Iterable[Path]) -> Stamp:
    """A value that changes with these files; one that is absent counts too."""
    return tuple(_stamp_of(file) for file in files)


def _stamp_of(file: Path) -> tuple[int, int] | None:
    try:
        seen = file.stat()
    except FileNotFoundError:
        return None
    return seen.st_mtime_ns, seen.st_size
