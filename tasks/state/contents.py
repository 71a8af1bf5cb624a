"""What belongs to the state: files of its folder, and objects of its location, under one name each.

A name is a path below the state folder, wherever the content is. Locks, sockets, logs, leases and
what is being built are not of the state, nor are secrets, unless they are asked for.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tasks.kernel import files
from tasks.kernel.location import OBJECTS, Location
from tasks.kernel.parts import PARTIAL
from tasks.kernel.settings import ARTIFACTS, SERVER_FILE, SHARED, VALUE, Build, Settings
from tasks.kernel.tenants import FOLDER as TENANTS

BACKUPS, RESTORING = "backups", ".restoring"
WHOLE = (f"{ARTIFACTS}/", "mlflow/artifacts/")
"""Folders of which all belongs to the state, whatever its name."""
PASSING = {"spill", "leases", "logs", "writers", "replicas", BACKUPS, OBJECTS}
PASSING_FILES = {"state.json", "endpoint.json", "ports.json", "server.json", "paused.json"}
# Keys, of a run under way. What is restored is another state, as a copied folder is.
PASSING_FILES |= {"s3-access.json", "identity"}
PASSING_ENDS = ("lock", ".pid", ".sock", "-wal", "-shm", "-journal", ".log", ".moved")
SECRETS = {"secrets", "secret", "certificates"}
SECRET_ENDS = (".key", ".pem")
LEDGERS, DATABASES, POINTERS, OTHERS, MODELS, BUILDS = range(6)
"""Order in which files are read. Each is written before what names it, so that is read first."""
LINKS = {"feature_tables/current": "published", "reports/latest": "newest"}
"""Links of a folder, and the files that say the same in a location."""
LOCAL = {"prefect", "platform", "serving", "edge", "feast", "keyring", "openbao"}
"""Folders that each machine has for itself, also where state is shared."""
PRIVATE = {"prefect", "platform", "edge", "openbao"}
"""Those of which nothing is shared."""


@dataclass(frozen=True)
class Shared:
    """An object of a location: content under its digest, or a file under its name."""

    location: Location
    name: str
    sha256: str = ""
    num_bytes: int = 0
    changed: float = 0


Source = Path | Shared | bytes


def belongs(name: str, *, secrets: bool = False) -> bool:
    """Whether a file of this name is part of the state."""
    parts = PurePosixPath(name).parts
    if parts[0] == ARTIFACTS and len(parts) > 3 and not parts[2].startswith("."):
        return parts[3] not in (SHARED, PARTIAL)  # whatever else is in a build is of it
    # OpenBao is copied by itself, while it runs: `bao operator raft snapshot`. So are tenants.
    apart = (SERVER_FILE, "openbao", TENANTS)
    if any(part.startswith(".") for part in parts) or parts[0] in apart:
        return False
    if name.startswith(WHOLE):
        return parts[-1] != "lock"
    if SECRETS & {*parts} or name.endswith(SECRET_ENDS):
        return secrets
    passing = PASSING & {*parts} or parts[-1] in PASSING_FILES
    return not passing and not name.endswith(PASSING_ENDS)


def order(name: str) -> int:
    """When a file is to be read."""
    if name.startswith(WHOLE):
        return BUILDS if name.startswith(WHOLE[0]) else MODELS
    path = PurePosixPath(name)
    if path.suffix == ".db":
        return DATABASES
    if path.parent.name == "feast":
        return LEDGERS
    pointer = {PurePosixPath(link).name for link in LINKS} | {*LINKS.values()}
    return POINTERS if path.name in pointer else OTHERS


def contents(
    settings: Settings, wanted: int, *, secrets: bool = False
) -> Iterator[tuple[str, Source]]:
    """Names of the state and where their content is, of those to be read at one time."""
    shared: dict[str, Source] = {}
    if settings.location is not None:
        shared = dict(_shared(settings.location, wanted, secrets=secrets))
        yield from sorted(shared.items())
    for name in names(settings.home):
        if order(name) != wanted or not belongs(name, secrets=secrets) or name in shared:
            continue
        if settings.location is None or LOCAL & {*name.split("/")}:
            yield name, settings.home / name


def link_of(path: Path, name: str) -> str:
    """Where a link of this name leads within the state; empty where it leads out, or is none."""
    try:
        link = os.readlink(path)
    except OSError:  # it is none, or was removed
        return ""
    if os.path.isabs(link):
        link = os.path.relpath(path.resolve(), path.parent.resolve())
    # Below a folder that is a link itself, what `..` means is not what the name says.
    is_true = Path(os.path.normpath(path.parent / link)).resolve() == path.resolve()
    return link if is_true and files.is_inside(name, link) else ""


def names(home: Path, folder: str = "") -> Iterator[str]:
    """Names below a folder. What a link leads to elsewhere is of the state, as if it lay here."""
    with suppress(FileNotFoundError, PermissionError):  # it was removed meanwhile, or is another's
        for entry in sorted(os.scandir(home / folder), key=lambda e: e.name):
            name, is_link = f"{folder}{entry.name}", entry.is_symlink()
            leads_out = is_link and not link_of(Path(entry.path), name) and belongs(name)
            if entry.is_dir(follow_symlinks=leads_out):
                yield from names(home, f"{name}/")
            elif is_link or entry.is_file():
                yield name


def _shared(location: Location, wanted: int, *, secrets: bool) -> Iterator[tuple[str, Source]]:
    for name, entry in location.entries("").items():
        if order(name) != wanted or not belongs(name, secrets=secrets):
            continue
        parts = PurePosixPath(name).parts
        if parts[0] != ARTIFACTS or len(parts) != 3 or not name.endswith(".json"):
            yield name, Shared(location, name, "", entry.num_bytes, entry.changed.timestamp())
            continue
        if (content := location.read(name)) is None:  # removed meanwhile
            continue
        build, folder = Build.model_validate_json(content), name.removesuffix(".json")
        yield f"{folder}/{VALUE}", json.dumps(build.value, indent=1).encode()
        for file, (sha256, num_bytes) in build.files.items():
            yield f"{folder}/{file}", Shared(location, name, sha256, num_bytes)


def build_of(name: str) -> tuple[str, str] | None:
    """Object of a location that names the build that a file is of, and the file's name in it."""
    parts = PurePosixPath(name).parts
    if parts[0] != ARTIFACTS or len(parts) < 4 or parts[-1] == SHARED:
        return None
    return "/".join(parts[:3]) + ".json", "/".join(parts[3:])
