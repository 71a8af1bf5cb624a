"""The Feast store of one installation: open it, load and apply its definitions.

Everything that opens the feature store opens the guarded one, Feast's server too.
"""

import importlib
import io
import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pyarrow.parquet as pq
from feast import Entity, FeatureService, FeatureStore, FeatureView, FileSource
from feast.data_source import DataSource
from feast.errors import FeatureServiceNotFoundException
from feast.infra.online_stores.redis import RedisOnlineStore
from feast.permissions.permission import Permission
from feast.project import Project
from feast.repo_config import RepoConfig
from pydantic import ValidationError
from sqlalchemy.exc import DatabaseError, IntegrityError, OperationalError, ProgrammingError

from tasks.features.access.profile import profile_file, read_profile
from tasks.features.access.versions import apply_service_versions, is_kept, number_views
from tasks.features.declared.columns import defining_files, feast_files
from tasks.features.declared.definitions import Definition, derived_definitions, derived_permissions
from tasks.features.offline.source import source_name
from tasks.features.tables.ledger import definitions_digest, read_json
from tasks.kernel.errors import ConfigurationError, FeatureStoreError, TransientError
from tasks.kernel.files import private_folder
from tasks.kernel.settings import bring, put
from tasks.kernel.values import faults
from tasks.metadata.database import held_everywhere

logger = logging.getLogger(__name__)

WRITER_WAIT_S = 900

OWNERS = "falaj:owners"
"""Hash in Redis: project to the identity of the registry that holds its definitions."""

_HELD: ContextVar[frozenset[Path]] = ContextVar("falaj_registry_locks", default=frozenset())


class GuardedFeatureStore(FeatureStore):
    """Feast's store with guards: one writer of definitions, no guessed windows."""

    config: RepoConfig

    def __init__(self, config: RepoConfig, home: Path) -> None:
        super().__init__(config=config)
        self.home, self.repo = home, Path(config.repo_path or ".")
        with file_lock(home / "feast" / "opening.lock"):
            try:  # opening it makes its tables where there are none
                _ = self.registry
            except (IntegrityError, ProgrammingError):  # somebody else has just made them
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
        lock = (self.home / "feast" / "registry.lock").resolve()
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


def file_lock(file: Path) -> AbstractContextManager[object]:
    """Hold a file against other processes and threads.

    Raises:
        TransientError: another one holds it for too long.
    """
    late = TransientError(
        f"another process has held {file} for {WRITER_WAIT_S} s; it is applying, pushing or "
        "materializing. Run again when it is done. Nothing was changed"
    )
    return held_everywhere(file, wait_s=WRITER_WAIT_S, held=lambda: late)


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
    name = feast.project
    others = sorted(owners.keys() - {name})
    if alike := [other for other in others if other.endswith(name) or name.endswith(other)]:
        client.hdel(OWNERS, feast.project)
        raise ConfigurationError(
            f"project {feast.project} and project {alike[0]} share this Redis, and one name ends "
            "in the other: Feast would remove the keys of both together. Rename one or use another "
            "Redis. Nothing was written"
        )


def _registry_identity(feast: FeatureStore) -> str:
    """Feast's own random id of the project in its registry."""
    known = feast.registry.list_project_metadata(feast.project)
    if known:
        return str(known[0].project_uuid)
    description = feast.config.project_description or ""
    feast.registry.apply_project(Project(name=feast.project, description=description))
    return str(feast.registry.list_project_metadata(feast.project)[0].project_uuid)


def open_store(
    home: Path, repo: Path, tables_path: Path | None = None, auth: Mapping[str, Any] | None = None
) -> GuardedFeatureStore:
    """Open the feature store that the chosen profile describes.

    Args:
        home: state folder, `${FALAJ_HOME}` in the file.
        repo: feature repository.
        tables_path: read feature tables here, pinning one version; None for the published one.
        auth: how servers know their callers, Feast's section `auth`; None where nobody is served.

    Raises:
        ConfigurationError: the file is missing or wrong, asks for something unsafe, or is of
            another project than the state folder.
        FeatureStoreError: the registry is damaged.
        TransientError: the registry cannot be reached.
    """
    described = read_profile(home, repo)
    project = described["project"]
    owner = read_json(home / "feast" / "applied.json").get("project", project)
    if owner != project:
        raise ConfigurationError(
            f"state folder {home} belongs to project {owner}, and the feature repository is of "
            f"project {project}; set FALAJ_HOME to a folder of its own. Nothing was opened"
        )
    if tables_path:
        described["offline_store"]["tables_path"] = str(tables_path)
    if auth:
        described["auth"] = dict(auth)
    private_folder(home / "feast")
    try:
        return GuardedFeatureStore(RepoConfig(**described, repo_path=repo), home)
    except ValidationError as exc:  # its own text would show passwords
        raise ConfigurationError(
            f"{profile_file(repo).name} is refused by Feast: {faults(exc)}. Nothing was opened"
        ) from None
    except OperationalError as exc:
        raise TransientError(
            f"the registry of {profile_file(repo).name} cannot be reached ({exc.orig}); start it "
            "or correct its address. Nothing was opened"
        ) from exc
    except DatabaseError as exc:
        raise FeatureStoreError(_damaged(described["registry"], exc)) from exc


def _damaged(registry: Mapping[str, Any], exc: DatabaseError) -> str:
    file = str(registry.get("path", "")).removeprefix("sqlite:///")
    place, remedy = (
        ("the registry", "repair it, or bring a backup with `falaj restore`")
        if "://" in file  # of a server, and may hold a password
        else (f"the registry {file}", "remove this file and refresh, which applies them again")
    )
    return (
        f"{place} cannot be read ({exc.orig}); expected a whole database with the feature "
        f"definitions; {remedy}. Nothing was opened"
    )


def apply_definitions(
    store: GuardedFeatureStore,
    definitions: list[Definition] | None = None,
    *,
    again: bool = False,
    keep_undefined: bool = False,
) -> None:
    """Make the registry say what the repository says, and the online store have its tables.

    Nothing is done where the same definitions were applied before, unless asked to do it `again`.

    Args:
        store: the open store.
        definitions: what `load_definitions` gave; None to load them where they are needed.
        again: apply whatever was applied before.
        keep_undefined: remove nothing that the repository no longer defines: whoever reads it goes
            on reading it until new tables are published.
    """
    applied = store.home / "feast" / "applied.json"
    digest, known = definitions_digest(store.repo), read_json(bring(applied)).get("definitions")
    if known == digest and store.list_feature_views() and not again:
        return
    objects = definitions if definitions is not None else load_definitions(store.repo)
    _check_sources(objects, store)
    services = [o for o in objects if isinstance(o, FeatureService)]
    rest = [o for o in objects if not isinstance(o, FeatureService)]
    with store.single_writer(), quiet():
        number_views(store, [o for o in objects if isinstance(o, FeatureView)])
        undefined = _undefined(store, objects)
        removed = [] if keep_undefined else undefined
        store.apply(rest, objects_to_delete=removed, partial=False)
        apply_service_versions(store, services)
    if removed != undefined:
        return  # unmarked: the next materialization applies them again and removes the rest
    put(applied, json.dumps({"definitions": digest, "project": store.project}))
    logger.info("applied %d feature definitions", len(objects))


def _check_sources(objects: list[Definition], store: FeatureStore) -> None:
    """See that each view finds its columns in its table, and says when rows were in the store.

    Raises:
        ConfigurationError: a table lacks a column, or a source passes over the table's `created`,
            so that training would see rows before they were in the store.
    """
    for view in objects:
        if not isinstance(view, FeatureView) or not isinstance(view.batch_source, FileSource):
            continue
        source = view.batch_source
        present = table_columns(store, source)
        if not present:
            continue  # it is elsewhere, or nothing was computed yet
        times = [source.timestamp_field, source.created_timestamp_column]
        wanted = [name for name in (*times, *(f.name for f in view.features)) if name]
        where = f"source {source.name} of feature view {view.name}"
        if missing := [n for n in wanted if source_name(source, n, present) is None]:
            raise ConfigurationError(
                f"{where} has no column {', '.join(missing)}; the table has "
                f"{', '.join(sorted(present))}. Change the definition or the table's query. "
                "Nothing was applied"
            )
        if "created" in present and "created" not in times and not times[1]:
            raise ConfigurationError(
                f"{where} names no created_timestamp_column, and its table has `created`: rows "
                "would count as known before they were in the store. Write "
                'created_timestamp_column="created" there. Nothing was applied'
            )


def table_columns(store: FeatureStore, source: FileSource) -> set[str]:
    """Columns of the table that a source names; none where no rows are on this machine."""
    tables = Path(getattr(store.config.offline_store, "tables_path", None) or ".")
    files = sorted((tables / source.path).glob("*.parquet"))[:1]
    return {name for file in files for name in pq.read_schema(file).names}


def _undefined(store: FeatureStore, objects: list[Definition]) -> list[Definition]:
    """What is registered and no longer defined, except what a kept version still reads."""
    kept = {(type(o).__name__, o.name) for o in objects}
    return [
        o
        for o in [
            *store.list_feature_services(),
            *store.list_feature_views(),
            *store.list_data_sources(),
            *store.list_entities(),
            *store.list_permissions(),
        ]
        if (type(o).__name__, o.name) not in kept
        and not o.name.startswith("__")
        and not is_kept(store, o)
    ]


def load_definitions(repo: Path) -> list[Definition]:
    """Feast objects of the modules at the top of the repository that import it, or derived ones.

    Modules are imported by their bare names, as Feast does it, and forgotten afterwards, so that
    another repository may have modules of the same names.

    Raises:
        ConfigurationError: a module cannot be imported, or a view's values would be too old from
            the start.
    """
    kinds = (Entity, DataSource, FeatureView, FeatureService, Permission)
    found: dict[int, Definition] = {}
    bare_names = [file.stem for file in sorted(repo.glob("*.py"))]
    if not defining_files(repo):
        found = {id(value): value for value in derived_definitions(repo)}
    sys.path.insert(0, str(repo))
    try:
        importlib.invalidate_caches()
        for name in bare_names:
            sys.modules.pop(name, None)
        for file in feast_files(repo):
            for value in vars(_imported(file.stem, repo)).values():
                if isinstance(value, kinds):
                    found[id(value)] = value
    finally:
        sys.path.remove(str(repo))
        for name in bare_names:
            sys.modules.pop(name, None)
    for view in found.values():
        if isinstance(view, FeatureView) and view.ttl and view.ttl < timedelta(0):
            raise ConfigurationError(
                f"feature view {view.name} has ttl {view.ttl}, so that no value is ever young "
                "enough; expected a positive time, or 0 for values that never grow too old. "
                "Mend the feature definitions. Nothing was applied"
            )
    objects = list(found.values())
    if not any(isinstance(o, Permission) for o in objects):
        objects += derived_permissions(objects)
    return objects


def _imported(name: str, repo: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as exc:  # whatever the code of the repository does
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(exc.__traceback__)
            if Path(frame.filename).parent == repo
        ]
        line = exc.lineno if isinstance(exc, SyntaxError) else lines[-1] if lines else None
        raise ConfigurationError(
            f"{name}.py of the feature repository cannot be imported: {type(exc).__name__} in line "
            f"{line or '?'}: {exc}. Mend the file. Nothing was applied"
        ) from exc


def find_service(store: FeatureStore, name: str) -> FeatureService:
    """A feature service by name.

    Raises:
        ConfigurationError: there is none; the message lists those there are.
    """
    try:
        return store.get_feature_service(name)
    except FeatureServiceNotFoundException as exc:
        known = ", ".join(sorted(s.name for s in store.list_feature_services())) or "none"
        raise ConfigurationError(
            f"feature service {name!r} does not exist in project {store.project}; there are: "
            f"{known}. Name one of these or define it in the feature repository. Nothing was read"
        ) from exc


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Feast's progress text off standard output; it goes to the debug log."""
    output = io.StringIO()
    with redirect_stdout(output):
        yield
    logger.debug("feast: %s", output.getvalue())
