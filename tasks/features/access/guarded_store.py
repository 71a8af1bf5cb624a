"""Feast's store with the guards that it lacks: one writer of definitions, no guessed windows.

Everything that opens the feature store opens this one, Feast's servers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from feast import FeatureStore
from feast.infra.online_stores.redis import RedisOnlineStore
from feast.infra.registry.registry import Registry
from feast.project import Project
from feast.repo_config import RepoConfig
from sqlalchemy.exc import IntegrityError, ProgrammingError

from tasks.features.access.presence import OWNERS
from tasks.kernel.errors import ConfigurationError, FeatureStoreError, TransientError
from tasks.kernel.files import locked

WRITER_WAIT_S = 900
"""An apply takes seconds; with a file registry a whole materialization is waited for."""

_HELD: ContextVar[frozenset[Path]] = ContextVar("falaj_registry_locks", default=frozenset())


class GuardedFeatureStore(FeatureStore):
    """A feature store of this project; see the module's docstring."""

    config: RepoConfig

    def __init__(self, config: RepoConfig, home: Path) -> None:
        super().__init__(config=config)
        self.home = home
        with file_lock(home / "feast" / "opening.lock"):
            self._open_registry()

    def _open_registry(self) -> None:
        """Open it, which makes its tables where there are none.

        Two that open an empty database at once both try; the second finds what the first made.
        """
        try:
            _ = self.registry
        except (IntegrityError, ProgrammingError):
            _ = self.registry

    def apply(self, *arguments: Any, **options: Any) -> None:
        """Register definitions; one process at a time, on top of what the others registered.

        Raises:
            ConfigurationError: the online store belongs to another installation.
            TransientError: another process holds the registry for too long.
        """
        with self.single_writer():
            claim_online_store(self)
            super().apply(*arguments, **options)
            self.registry.refresh(self.project)  # Feast leaves it to a timer in cache mode `thread`

    def materialize(
        self, start_date: datetime, end_date: datetime, *arguments: Any, **options: Any
    ) -> None:
        """Write values online. A file registry, which notes each view's state, has one writer."""
        if not isinstance(self.registry, Registry):
            super().materialize(start_date, end_date, *arguments, **options)
            return
        with self.single_writer():
            super().materialize(start_date, end_date, *arguments, **options)

    def _make_inferences(self, *arguments: Any, **options: Any) -> None:
        """Columns of relative sources are found where retrieval finds them, under `tables_path`."""
        known = self.config
        tables = getattr(known.offline_store, "tables_path", None)
        if tables:
            self.config = known.model_copy(update={"repo_path": Path(tables)})
        try:
            super()._make_inferences(*arguments, **options)
        finally:
            self.config = known

    def materialize_incremental(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refused: it guesses its window.

        Raises:
            FeatureStoreError: always.
        """
        raise FeatureStoreError(
            "incremental materialization starts at the clock's now minus the TTL where nothing was "
            "written before, and never sees rows that arrive late; materialize a window with a "
            "start and an end instead. Nothing was written"
        )

    @contextmanager
    def single_writer(self) -> Iterator[None]:
        """Hold the registry against other processes; a block inside a block holds it already.

        Raises:
            TransientError: another process holds it for too long.
        """
        lock = self._lock_file()
        if lock in _HELD.get():
            yield
            return
        with file_lock(lock):
            token = _HELD.set(_HELD.get() | {lock})
            try:
                self.registry.refresh(self.project)
                yield
            finally:
                _HELD.reset(token)

    def _lock_file(self) -> Path:
        """Beside a registry file, which several state folders may share; else in the folder."""
        path = self.config.registry.path
        if isinstance(self.registry, Registry) and "://" not in path:
            return Path(path).with_suffix(".lock").resolve()
        return (self.home / "feast" / "registry.lock").resolve()


@contextmanager
def file_lock(file: Path) -> Iterator[None]:
    """Hold a file against other processes and threads.

    Raises:
        TransientError: another one holds it for too long.
    """

    def held() -> TransientError:
        return TransientError(
            f"another process has held {file} for {WRITER_WAIT_S} s; it is applying, pushing or "
            "materializing. Run again when it is done. Nothing was changed"
        )

    with locked(file, wait_s=WRITER_WAIT_S, held=held):
        yield


def claim_online_store(feast: FeatureStore) -> None:
    """Note this registry as the owner of its project in Redis, or find that it is.

    Feast names everything in Redis by entity and project alone. Two installations of one project on
    one Redis would serve each other's values, and a project whose name ends like another's would
    have its keys removed with the other's.

    Raises:
        ConfigurationError: another registry owns the project, or two projects' names end alike.
    """
    online = feast._get_provider().online_store
    if not isinstance(online, RedisOnlineStore):
        return  # a file under the state folder has no second owner
    client = online._get_client(feast.config.online_store)
    identity = _registry_identity(feast)
    client.hsetnx(OWNERS, feast.project, identity)
    owners = {k.decode(): v.decode() for k, v in client.hgetall(OWNERS).items()}
    if owners[feast.project] != identity:
        raise ConfigurationError(
            f"project {feast.project} on this Redis belongs to another registry: two installations "
            "would overwrite each other's values. Give one another project name or another Redis, "
            f"or, if the other is gone, remove field {feast.project} of hash {OWNERS}. Nothing was "
            "written"
        )
    if alike := sorted(other for other in owners if _ends_alike(other, feast.project)):
        client.hdel(OWNERS, feast.project)
        raise ConfigurationError(
            f"project {feast.project} and project {alike[0]} share this Redis, and one name ends "
            "in the other: Feast would remove the keys of both together. Rename one or use another "
            "Redis. Nothing was written"
        )


def _ends_alike(other: str, project: str) -> bool:
    return other != project and (other.endswith(project) or project.endswith(other))


def _registry_identity(feast: FeatureStore) -> str:
    """Feast's own random id of the project in its registry."""
    known = feast.registry.list_project_metadata(feast.project)
    if known:
        return str(known[0].project_uuid)
    description = feast.config.project_description or ""
    feast.registry.apply_project(Project(name=feast.project, description=description))
    return str(feast.registry.list_project_metadata(feast.project)[0].project_uuid)
