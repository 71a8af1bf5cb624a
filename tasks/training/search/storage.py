"""Where studies are kept: SQLite under the state folder, or a PostgreSQL server named by secret."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from tasks.kernel import errors
from tasks.kernel.files import locked
from tasks.metadata.database import advisory_lock

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
                address. The error never shows the address.
        """
        if not variable:
            return cls(URL.create("sqlite", database=str(folder / DATABASE)), folder)
        address = _secret(variable, environment)
        try:
            url = make_url(address)
        except ArgumentError:
            url = URL.create("none")
        if url.get_backend_name() != "postgresql":
            raise errors.ConfigurationError(
                f"{variable} holds no PostgreSQL address; expected "
                "postgresql://user:password@host/database. Nothing was started"
            )
        return cls(url.set(drivername="postgresql+psycopg"), folder)

    @property
    def kind(self) -> Literal["sqlite", "postgresql"]:
        """Sort of database."""
        return "sqlite" if self.url.get_backend_name() == "sqlite" else "postgresql"

    def open(self) -> RDBStorage:
        """The database as Optuna takes it, which makes what is missing in it.

        Raises:
            StorageError: the disk refused.
            TransientError: the server does not answer.
        """
        load_optuna()
        from optuna.storages import RDBStorage

        # No pool: trials come and go in threads and processes of their own.
        options: dict[str, object] = {"poolclass": NullPool}
        if self.kind == "sqlite":
            options["connect_args"] = {"timeout": SQLITE_WAIT_S}
        address = self.url.render_as_string(hide_password=False)
        with locked(self.folder / "making.lock"), explained(self):
            return RDBStorage(address, engine_kwargs=options)

    @contextmanager
    def held(self, study: str) -> Iterator[None]:
        """Be the only search that drives this study, on this machine and on the database.

        Raises:
            TransientError: another search drives it.
        """

        def is_driven() -> errors.TransientError:
            return errors.TransientError(
                f"another process drives study {study}; wait until it ends, its trials will be "
                "found. Nothing was started"
            )

        with ExitStack() as held:
            held.enter_context(locked(self.folder / f"{study}.lock", wait_s=0, held=is_driven))
            if self.kind == "postgresql":
                held.enter_context(advisory_lock(self.url, study, wait_s=0, held=is_driven))
            yield


@contextmanager
def explained(storage: StudyStorage) -> Iterator[None]:
    """Turn what the database raises into errors of ours, without its address."""
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as exc:
        cause = exc if isinstance(exc, SQLAlchemyError) else exc.__cause__
        reason = str(cause).strip().splitlines()[0] if cause else str(exc)
        where = f"the {storage.kind} database of the search"
        if isinstance(cause, OperationalError) and not any(sign in reason for sign in _REFUSED):
            raise errors.TransientError(
                f"{where} does not answer ({reason}); finished trials are kept, run again to go on"
            ) from exc
        raise errors.StorageError(
            f"{where} in {storage.folder} refused ({reason}); free space, mend the permissions, or "
            "bring a damaged database with `falaj restore`, and run again: finished trials are kept"
        ) from exc


def _secret(variable: str, environment: Mapping[str, str]) -> str:
    if address := environment.get(variable):
        return address
    if file := environment.get(f"{variable}_FILE"):
        try:
            return Path(file).read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise errors.ConfigurationError(
                f"{variable}_FILE names a file that cannot be read ({exc.strerror}); expected one "
                "with the address of the search's database"
            ) from exc
    raise errors.ConfigurationError(
        f"search.storage names {variable}, but neither {variable} nor {variable}_FILE is set; set "
        "one, or leave search.storage empty for SQLite under the state folder"
    )
