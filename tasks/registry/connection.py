"""Opening MLflow quietly and safely: no usage data, no log noise, a whole database, one writer.

`import mlflow` starts a usage-data client, sets up logging and reads the environment for both. So
no module of this room imports it at the top: `load_mlflow` sets the environment first, as the first
step of every use, and importing this room has no effects.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from sqlalchemy import Dialect, Engine, NullPool, create_engine, event, text
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError

from tasks.kernel import errors
from tasks.kernel.files import flush_to_disk, make_folder
from tasks.kernel.settings import MLFLOW_SCHEMA, Settings
from tasks.metadata.database import DAMAGED, REFUSED, held_everywhere

LOCK_WAIT_S = 120.0
SQLITE_SCHEME = "sqlite:///"
ADDRESS = "mlflow-artifacts:/"
"""MLflow's own: its server resolves it against the artifacts that it was started with."""
OF_ARTIFACTS = "/mlflow/artifacts/"
SQLITE_MAGIC = b"SQLite format 3\0"
_LOCKED = re.compile("database (table |schema )?is locked")


@dataclass(frozen=True)
class RegistryLocation:
    """Where the tracking database and the files of its runs are."""

    uri: str
    """SQLAlchemy address of the tracking and registry database."""
    artifacts: Path
    """Local folder of the runs' files."""
    home: Path | None = None
    """State folder, whose keys sign and whose journal says what changes; None: the folder of the
    artifacts' folder, without a journal."""

    @classmethod
    def of(cls, settings: Settings) -> RegistryLocation:
        """The registry of one installation."""
        return cls(settings.mlflow_uri, settings.mlflow_artifacts, settings.home)

    def local_path(self, address: str) -> Path:
        """Where the files of an address of the database are on this machine.

        Addresses are relative to the artifacts. Those that earlier releases wrote name a folder of
        the disk; what follows the artifacts' own name in them counts, wherever that folder was.

        Raises:
            RegistryError: the address is of another place.
        """
        parts = urlsplit(address)
        path = url2pathname(parts.path)
        if parts.scheme == "mlflow-artifacts" and ".." not in path.split("/"):
            return self.artifacts / path.lstrip("/")
        beginning, mark, inside = path.rpartition(OF_ARTIFACTS)
        if parts.scheme not in ("", "file") or not (mark and beginning):
            raise errors.RegistryError(
                f"files of this registry are at {parts.scheme}://{parts.hostname or ''}{path}, "
                f"expected {ADDRESS}<experiment>/<run>; register the model again with this "
                "installation"
            )
        return self.artifacts / inside

    def address(self, path: Path) -> str:
        """Address by which the database names a folder of the artifacts."""
        return f"{ADDRESS}{path.relative_to(self.artifacts).as_posix()}"

    @property
    def database_path(self) -> Path | None:
        """File of an SQLite database; None for a database server."""
        if not self.uri.startswith(SQLITE_SCHEME):
            return None
        return Path(self.uri.removeprefix(SQLITE_SCHEME))


def load_mlflow() -> ModuleType:
    """Import MLflow with usage data off and its log at warnings, for this process and its children.

    MLflow reads `MLFLOW_DISABLE_TELEMETRY` whenever it is about to record something (of
    `DO_NOT_TRACK` it only knows the value `true`), and the log level while it is imported. Where
    somebody imported it before, its usage-data client is taken down again here.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    import mlflow
    from mlflow.telemetry import set_telemetry_client

    set_telemetry_client()  # type: ignore[no-untyped-call]
    # Its database errors reach the caller as ours, so their stack traces need not be logged too.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    return mlflow


def prepare_database(location: RegistryLocation) -> None:
    """Create the database on first use, aside and renamed into place: whole or absent.

    Creating runs all of MLflow's schema migrations, which are not one transaction: a process
    killed among them would leave a database that can be neither used nor migrated. PostgreSQL makes
    a schema, and rolls back what was cut off.

    Raises:
        RegistryError: the file is no SQLite database.
        StorageError: the disk refused a write.
    """
    path = location.database_path
    if path is None:
        _prepare_schema(location)
        return
    with errors.refused_writes_explained(path):
        if _is_database(path):
            return
    with exclusive(location), errors.refused_writes_explained(path), explained(location):
        if _is_database(path):
            return
        make_folder(path.parent)
        aside = path.with_name(f".{path.name}-new")
        for leftover in path.parent.glob(f"{aside.name}*"):  # of a process that was killed
            leftover.unlink()
        with _unsynced(aside):  # a hundred migrations, each of which would wait for the disk
            _make_tables(f"{SQLITE_SCHEME}{aside}")
        flush_to_disk(aside)
        aside.replace(path)
        flush_to_disk(path.parent)


@contextmanager
def _unsynced(file: Path) -> Iterator[None]:
    """Let connections to one SQLite file keep their journal in memory, and flush nothing."""

    def connect(dialect: Dialect, _: object, where: list[str], options: dict[str, Any]) -> Any:
        if where != [str(file)]:
            return None
        made = dialect.connect(*where, **options)
        made.executescript("PRAGMA journal_mode=MEMORY; PRAGMA synchronous=OFF")
        return made

    event.listen(Engine, "do_connect", connect)
    try:
        yield
    finally:
        event.remove(Engine, "do_connect", connect)


@cache
def _prepare_schema(location: RegistryLocation) -> None:
    """Once a process where it could be done."""
    with exclusive(location), explained(location):
        engine = create_engine(location.uri, poolclass=NullPool)
        with engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {MLFLOW_SCHEMA}"))
        _make_tables(location.uri)


def _make_tables(uri: str) -> None:
    load_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(uri, ADDRESS).engine.dispose()  # type: ignore[no-untyped-call]


def _is_database(path: Path) -> bool:
    """True for an SQLite file, False where there is none yet.

    Raises:
        RegistryError: it is something else. MLflow itself would retry for over a minute.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return False
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC:
                return True
    raise errors.RegistryError(
        f"{path} is not an SQLite database, expected the tracking database; it was damaged or "
        "replaced. Move it away; `falaj restore` brings a backup into an empty state"
    )


def exclusive(
    location: RegistryLocation, wait_s: float = LOCK_WAIT_S
) -> AbstractContextManager[object]:
    """Be the only process (and thread) that changes this registry. Not re-entrant.

    Raises:
        TransientError: somebody else held it for `wait_s` seconds.
        StorageError: the folder cannot be written.
    """
    path = location.artifacts / ".registry.lock"
    busy = errors.TransientError(
        f"another process held {path} for {wait_s:g} s while changing the model registry; nothing "
        "was changed; try again"
    )
    return held_everywhere(path, wait_s=wait_s, held=lambda: busy)


@contextmanager
def explained(location: RegistryLocation) -> Iterator[None]:
    """Turn what MLflow and its database raise into sentences of ours.

    Raises:
        TransientError: the database was busy, or its server does not answer.
        StorageError: its disk refused.
        RegistryError: everything else.
    """
    load_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, SQLAlchemyError) as exc:
        busy = isinstance(exc, MlflowException) and exc.error_code == "TEMPORARILY_UNAVAILABLE"
        # Of SQLite these say that it is damaged, of a server that it does not answer just now.
        is_away = isinstance(exc, OperationalError | InterfaceError)
        busy |= is_away and location.database_path is None
        raise _as_ours(str(exc), location, busy=busy) from exc


def _as_ours(text: str, location: RegistryLocation, *, busy: bool) -> errors.FalajError:
    where = location.database_path or "the tracking database"
    reason = text.strip().splitlines()[0] if text.strip() else "no reason given"
    kept = f"{where}: the change was not made ({reason})"
    if _LOCKED.search(text):
        return errors.TransientError(f"{kept}; another process holds its lock. Try again later")
    if any(sign in text for sign in REFUSED):
        return errors.StorageError(f"{kept}; expected a writable file with free space. Retry then")
    if any(sign in text for sign in DAMAGED):
        return errors.RegistryError(
            f"{kept}; the file is damaged. `falaj restore` brings a backup, or move it away to "
            f"begin an empty registry; the files of earlier runs stay in {location.artifacts}"
        )
    if "out-of-date database schema" in text:
        return errors.RegistryError(
            f"{kept}; another version of MLflow wrote it. Run `falaj backup`, then "
            "`mlflow db upgrade`"
        )
    return errors.TransientError(f"{kept}; try again") if busy else errors.RegistryError(kept)
