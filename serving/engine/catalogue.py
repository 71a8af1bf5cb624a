"""What there is to load: the seam between an engine and the registry.

Everything here may wait for a disk or a database, and is called on the loader's thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from serving.engine.config import EngineConfig
from serving.engine.loading import open_version
from serving.engine.versions import LoadedVersion, VersionKey
from serving.errors import NotReadyError, UnknownModelError
from tasks.kernel.errors import FalajError
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import PROGRAM_TAG, VARIANTS_TAG, RegisteredVersion, Registry

logger = logging.getLogger(__name__)


class Catalogue(Protocol):
    """Versions that can be loaded."""

    def by_alias(self, model: str, alias: str) -> VersionKey | None:
        """The version that an alias names; None where there is no such alias or model.

        Raises:
            NotReadyError: the registry is away.
        """

    def by_number(self, model: str, version: str) -> VersionKey:
        """A version by its number.

        Raises:
            UnknownModelError: there is no such version.
            NotReadyError: the registry is away.
        """

    def open(self, key: VersionKey) -> LoadedVersion:
        """Load a version and check it.

        Raises:
            UnknownModelError: it is gone.
            NotReadyError: its files, its stamp or its golden batch are not as recorded.
        """

    def has_changed(self) -> bool:
        """Whether anything may have changed since it was asked last; cheap."""


class RegistryCatalogue:
    """Versions of the model registry.

    Args:
        location: of the registry; a database that does not exist is not created.
        golden: folder that keeps golden batches.
        config: hardware, models and what to do without variants.
    """

    def __init__(self, location: RegistryLocation, golden: Path, config: EngineConfig) -> None:
        self._location = location
        self._golden = golden
        self._config = config
        self._opened: Registry | None = None
        self._seen: tuple[object, ...] | None = None

    def by_alias(self, model: str, alias: str) -> VersionKey | None:
        """See `Catalogue`."""
        registry = self._registry()
        if registry is None:
            return None
        try:
            found = registry.by_alias(model, alias)
        except FalajError as exc:
            raise NotReadyError(f"alias {alias!r} of {model} cannot be read: {exc}") from exc
        return None if found is None else _key(found)

    def by_number(self, model: str, version: str) -> VersionKey:
        """See `Catalogue`."""
        return _key(self._found(model, version))

    def open(self, key: VersionKey) -> LoadedVersion:
        """See `Catalogue`."""
        found = self._found(key.model, key.version)
        try:
            return open_version(found, _key(found), self._config, self._golden)
        except FalajError as exc:
            raise NotReadyError(str(exc)) from exc
        except OSError as exc:
            raise NotReadyError(f"{found}: its files cannot be read ({exc})") from exc

    def has_changed(self) -> bool:
        """Whether the database's files changed; of a database server always."""
        path = self._location.database_path
        if path is None:
            return True
        seen = tuple(_state_of(Path(f"{path}{suffix}")) for suffix in ("", "-wal", "-journal"))
        changed = seen != self._seen
        self._seen = seen
        return changed

    def _found(self, model: str, version: str) -> RegisteredVersion:
        registry = self._registry()
        if registry is None:
            raise UnknownModelError(f"there is no registry at {self._location.database_path} yet")
        try:
            versions = registry.versions(model)
        except FalajError as exc:
            raise NotReadyError(f"versions of {model} cannot be read: {exc}") from exc
        for one in versions:
            if str(one.number) == version:
                return one
        raise UnknownModelError(
            f"the registry has no version {version!r} of {model!r}{_others(versions)}"
        )

    def _registry(self) -> Registry | None:
        """The registry; None while its database does not exist."""
        if self._opened is None:
            path = self._location.database_path
            if path is not None and not path.exists():
                return None
            try:
                self._opened = Registry(self._location)
            except FalajError as exc:
                raise NotReadyError(f"the registry cannot be opened: {exc}") from exc
        return self._opened


def _others(versions: Iterable[RegisteredVersion]) -> str:
    numbers = [str(one.number) for one in versions]
    return f"; it has {', '.join(numbers[-8:])}" if numbers else ", and no other one"


def _key(version: RegisteredVersion) -> VersionKey:
    tags = (version.tags.get(PROGRAM_TAG, ""), version.tags.get(VARIANTS_TAG, ""))
    return VersionKey(version.name, str(version.number), ":".join(tags))


def _state_of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
