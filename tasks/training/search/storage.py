"""Where studies are kept: SQLite under the state folder, or a PostgreSQL server named by secret."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from tasks.kernel.errors import (
    ConfigurationError,
    StorageError,
    TransientError,
    refused_writes_explained,
)
from tasks.kernel.files import flush_to_disk, locked

if TYPE_CHECKING:
    from types import ModuleType

    from optuna.storages import RDBStorage

DATABASE = "studies.db"
SQLITE_WAIT_S = 120
_REFUSED = ("readonly database", "unable to open", "disk is full", "disk I/O error")


def load_optuna() -> ModuleType:
    """Import Optuna with its log at warnings and in our handlers, not in one of its own."""
    import optuna

    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Migrations of an empty database are no news.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return optuna


@dataclass(frozen=True)
class StudyStorage:
    """Address of the studies' database, which may hold a password: never logged or sent."""

    url: URL
    folder: Path
    """Folder of the SQLite database and of the locks."""

    @classmethod
    def of(cls, variable: str, folder: Path, environment: Mapping[str, str]) -> StudyStorage:
        """SQLite in `folder`, or what the environment variable `variable` or its file names.

        Raises:
            ConfigurationError: neither is set, the file cannot be read, or it is no PostgreSQL
                address. The sentence never shows the address.
        """
        if not variable:
            return cls(URL.create("sqlite", database=str(folder / DATABASE)), folder)
        address = _secret(variable, environment)
        try:
            url = make_url(address)
        except ArgumentError:
            url = URL.create("none")
        if url.get_backend_name() != "postgresql":
            raise ConfigurationError(
                f"{variable} holds no PostgreSQL address; expected "
                "postgresql://user:password@host/database. Nothing was started"
            )
        return cls(url.set(drivername="postgresql+psycopg"), folder)

    @property
    def kind(self) -> Literal["sqlite", "postgresql"]:
        """Sort of database."""
        return "sqlite" if self.url.get_backend_name() == "sqlite" else "postgresql"

    def open(self) -> RDBStorage:
        """The database as Optuna takes it; made on first use.

        Raises:
            StorageError: the disk refused.
            TransientError: the server does not answer.
        """
        self.prepare()
        return self._connect(self.url)

    def prepare(self) -> None:
        """Create an SQLite database aside and rename it into place: whole or absent."""
        if self.kind != "sqlite":
            return
        path = self.folder / DATABASE
        with refused_writes_explained(path):
            if path.exists():
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = self.folder / f".{DATABASE}-{os.getpid()}"
            aside.unlink(missing_ok=True)
            storage = self._connect(self.url.set(database=str(aside)))
            storage.engine.dispose()
            flush_to_disk(aside)
            if not path.exists():
                aside.replace(path)
            aside.unlink(missing_ok=True)

    def _connect(self, url: URL) -> RDBStorage:
        load_optuna()
        from optuna.storages import RDBStorage

        # No pool: trials come and go in threads and processes of their own.
        options: dict[str, object] = {"poolclass": NullPool}
        if self.kind == "sqlite":
            options["connect_args"] = {"timeout": SQLITE_WAIT_S}
        with explained(self):
            return RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=options)

    @contextmanager
    def held(self, study: str) -> Iterator[None]:
        """Be the only search that drives this study, on this machine and on the database.

        Raises:
            TransientError: another search drives it.
        """
        with _file_lock(self.folder / f"{study}.lock", study):
            if self.kind == "sqlite":
                yield
            else:
                with self._advisory_lock(study):
                    yield

    @contextmanager
    def _advisory_lock(self, study: str) -> Iterator[None]:
        """A lock of the server's, which ends with the connection, however that ends."""
        key = int.from_bytes(hashlib.sha256(study.encode()).digest()[:8], "big", signed=True)
        engine = create_engine(
            self.url,
            poolclass=NullPool,
            connect_args={"keepalives_idle": 30, "connect_timeout": 30},
        )
        with explained(self):
            connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with connection:
            if not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": key}):
                raise _is_driven(study)
            yield


@contextmanager
def explained(storage: StudyStorage) -> Iterator[None]:
    """Turn what the database raises into sentences of ours, without its address."""
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as exc:
        cause = exc if isinstance(exc, SQLAlchemyError) else exc.__cause__
        said = str(cause).strip().splitlines()[0] if cause else str(exc)
        where = f"the {storage.kind} database of the search"
        if any(sign in said for sign in _REFUSED):
            raise StorageError(
                f"{where} in {storage.folder}: the disk refused ({said}); free space or mend the "
                "permissions and run again, finished trials are kept"
            ) from exc
        if isinstance(cause, OperationalError):
            raise TransientError(
                f"{where} does not answer ({said}); finished trials are kept, run again to go on"
            ) from exc
        raise StorageError(
            f"{where} refused ({said}). Was it written by another version of Optuna, or damaged? "
            "Restore it, or move it away to begin a new study"
        ) from exc


@contextmanager
def _file_lock(path: Path, study: str) -> Iterator[None]:
    with locked(path, wait_s=0, held=lambda: _is_driven(study)):
        yield


def _is_driven(study: str) -> TransientError:
    return TransientError(
        f"another process drives study {study}; wait until it ends, its trials will be found. "
        "Nothing was started"
    )


def _secret(variable: str, environment: Mapping[str, str]) -> str:
    if address := environment.get(variable):
        return address
    if file := environment.get(f"{variable}_FILE"):
        try:
            return Path(file).read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise ConfigurationError(
                f"{variable}_FILE names a file that cannot be read ({exc.strerror}); expected one "
                "with the address of the search's database"
            ) from exc
    raise ConfigurationError(
        f"search.storage names {variable}, but neither {variable} nor {variable}_FILE is set; set "
        "one, or leave search.storage empty for SQLite under the state folder"
    )
