"""Moving a state from one folder to the stores and databases of a server, all at once.

It is a backup into the new location, which keeps content by its digest, and a restore from there
into the databases and names of the server. So content is sent once where it was cut off, all of it
is read again and compared, and the first backup is there already.
"""

import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tasks.kernel import files
from tasks.kernel.errors import ConfigurationError, StorageError
from tasks.kernel.settings import SERVER_FILE, Settings
from tasks.metadata.database import USED, held_everywhere
from tasks.metadata.identity import state_identity
from tasks.state.backup import Say, back_up, check_empty, restore
from tasks.state.contents import BUILDS, belongs, contents
from tasks.state.databases import MLFLOW, OPERATION, Prepare

MARK = ".migrating"
PLATFORM_LOCKS = ("platform/lock", "serving/server*.lock", "edge/running.lock")


@contextmanager
def nobody_else(home: Path) -> Iterator[None]:
    """Keep runs out, on all machines, and see that no service of this one uses the state.

    Raises:
        ConfigurationError: one does.
    """
    busy = ConfigurationError(
        f"a run, a platform or a server uses the state of {home}, here or on another machine; "
        "end it first (falaj down) or wait. Nothing was changed"
    )
    used = held_everywhere(home / USED, wait_s=0, held=lambda: busy)
    with files.locked(home / "run.lock", wait_s=0, held=lambda: busy), used:
        if any(files.is_held(path) for lock in PLATFORM_LOCKS for path in home.glob(lock)):
            raise busy
        yield


def examine(settings: Settings, target: Settings, redis: str | None) -> tuple[int, int]:
    """See that the new places answer, may be written, and are empty or hold what was cut off.

    Returns:
        Number of files that would move, and their bytes.

    Raises:
        ConfigurationError: one is not empty, or the state is on a server already.
        StorageError, TransientError: one refuses, or does not answer.
    """
    if settings.location is not None or settings.database_url is not None:
        raise ConfigurationError(
            f"the state of {settings.home} is on a server already, as {SERVER_FILE} or the "
            "environment says; expected one in its folder. Nothing was changed"
        )
    location = target.location
    if location is None or target.database_url is None:
        raise ConfigurationError(
            "expected `state: s3://bucket/prefix` and `database: postgresql://...` in the file. "
            "Nothing was changed"
        )
    probe = f".probe-{secrets.token_hex(4)}"
    location.create(probe, b"")
    location.remove([probe])
    if redis:
        host, _, port = redis.split(",")[0].rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as exc:
            raise StorageError(
                f"Redis at {host}:{port} does not answer ({exc}); expected host:port. "
                "Nothing was changed"
            ) from exc
    mark = location.read(MARK)
    if mark is None or mark != state_identity(settings).encode():
        # The folder is not empty, as it is what moves.
        check_empty(replace(target, home=settings.home / MARK))
    sizes = [
        source.lstat().st_size
        for wanted in range(BUILDS + 1)
        for _, source in contents(settings, wanted)
        if isinstance(source, Path)
    ]
    return len(sizes), sum(sizes)


def migrate(
    settings: Settings, target: Settings, text: str, prepare: Mapping[str, Prepare], say: Say
) -> None:
    """Move the state, after `examine`; later commands on its folder use the new places.

    Args:
        text: of `server.yaml`, kept beside the state.

    Raises:
        StorageError, TransientError: a store does not answer, or refuses; the state is as it was.
    """
    location = target.location
    assert location is not None
    location.write(MARK, state_identity(settings).encode())
    backup = back_up(settings, location, prepare, say)
    # The state may have been used since a move was cut off: of that one the content alone counts.
    location.remove(name for name in location.entries("") if belongs(name))
    restore(target, location, backup, prepare, say, only_shared=True)
    location.remove([MARK])  # beside a state in use it would let in a copy of the old one
    files.write_atomically(settings.home / SERVER_FILE, text.encode(), private=True)
    for name in (OPERATION, MLFLOW):
        if (database := settings.home / name).exists():
            if (log := Path(f"{database}-wal")).exists():  # a killed process leaves rows in it
                log.replace(f"{database}.moved-wal")
            database.replace(f"{database}.moved")
            database.write_text(f"moved: see {SERVER_FILE}\n")
