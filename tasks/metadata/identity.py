"""Which state a process works on, and a check that it is the one that it should be.

Two random names, one in the location of the state and one in the database, made by whoever comes
first. Processes that see the same two read and write the same things. A folder that holds the whole
state has its name in a file that knows its own inode: in a copy of the folder that is another one,
under whatever path the folder itself is mounted. So a copy gets a name of its own.
"""

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from sqlalchemy import select

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import locked, replacing, write_atomically
from tasks.kernel.location import Location
from tasks.kernel.settings import SERVER_FILE, Settings
from tasks.kernel.tenants import FOLDER, installation_of, tenant_of
from tasks.metadata.database import insert_if_absent, open_database, transaction
from tasks.metadata.tables import identities

EXPECTED = "FALAJ_EXPECTED_STATE"
"""Variable of runs on work pools: the identity that their platform has."""
FILE = "identity"
"""In the state folder: `<name> of <location>`, or `<name> at <inode of the file> <folder>`."""


def state_identity(settings: Settings) -> str:
    """`<name of the location>.<name of the database>`.

    Raises:
        ConfigurationError: the state folder holds copies of another location than the one that is
            set, or that one is empty: not mounted, perhaps; or it is another tenant's.
        TransientError, StorageError: the location or the database does not answer, or refuses.
    """
    file = settings.home / FILE
    if settings.location is None:
        name = _name_of_folder(file)
    else:
        known, kind, of = _recorded(file)
        if kind == "at" and copied_from(settings.home):
            known = ""  # that is the name of the folder it was copied from
        url = settings.location.url
        _check_apart(settings.home, settings.location)
        new = (known or new_name(settings.home)).encode()
        shared = settings.location.read(FILE)
        if known and (shared != new if shared else kind == "of"):
            there = f"is the state {shared.decode()}" if shared else f"has no object `{FILE}`"
            raise ConfigurationError(
                f"{settings.home} holds copies of the state {known}, and {url} {there}; expected "
                f"{known}. Mount it if it is not mounted, set FALAJ_STATE and AWS_ENDPOINT_URL to "
                "the location of these copies, or FALAJ_HOME to another folder. If that state was "
                f"given up on purpose, remove {file}. Nothing was changed"
            )
        if shared is None:
            _check_conditions(settings.location)
            created = settings.location.create(FILE, new)
            shared = new if created else settings.location.read(FILE) or new
        name = shared.decode()
        check_tenant(settings.home, name, url)
        if of != url:
            write_atomically(file, f"{name} of {url}")
    with transaction(open_database(settings.metadata_url)) as connection:
        insert_if_absent(connection, identities, number=1, identity=new_name(settings.home))
        found = connection.execute(select(identities.c.identity)).scalar_one()
    if settings.database_url is not None:
        check_tenant(settings.home, found, "the database of FALAJ_DATABASE_URL")
    return f"{name}.{found}"


def new_name(home: Path) -> str:
    """A random name for what keeps a state; before it stands whose that is, of several tenants."""
    return "-".join(filter(None, [tenant_of(home), token_hex(8)]))


def check_tenant(home: Path, name: str, where: str) -> None:
    """See that a location, database or backup is of the tenant of a state folder, and no other's.

    Args:
        home: the state folder.
        name: of the state that is kept there; see `new_name`.
        where: what keeps it, for people.

    Raises:
        ConfigurationError: it is another's.
    """
    own, theirs = (t or "the installation" for t in (tenant_of(home), name[:-17]))
    if own != theirs:
        raise ConfigurationError(
            f"{where} holds the state of {theirs}, and {home} is of {own}; name one of its own, "
            f"as in {home / SERVER_FILE}. Nothing was read"
        )


def _check_apart(home: Path, location: Location) -> None:
    """See that a location is in no other state folder of the installation."""
    tenant, folder = tenant_of(home), location.folder and location.folder.resolve()
    others = installation_of(home) if tenant else home / FOLDER
    if folder and folder.is_relative_to(others) and not (tenant and folder.is_relative_to(home)):
        raise ConfigurationError(
            f"{location.url} lies in {others}, with the state of others than "
            f"{tenant or 'the installation'}; name a place of its own. Nothing was read"
        )


def copied_from(home: Path) -> tuple[Path, bool] | None:
    """Where a state folder was copied, moved or restored from, and whether the original is there.

    None once the copy has a name of its own.
    """
    name, kind, rest = _recorded(home / FILE)
    inode, _, folder = rest.partition(" ")
    if kind != "at" or inode == str((home / FILE).stat().st_ino):
        return None
    return Path(folder), _recorded(Path(folder) / FILE)[0] == name


def _recorded(file: Path) -> list[str]:
    text = ""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        text = file.read_text(encoding="utf-8", errors="replace")
    return [*text.strip().split(" ", 2), "", "", ""][:3]


def _name_of_folder(file: Path) -> str:
    with locked(file.with_suffix(".lock")):
        name, kind, rest = _recorded(file)
        if kind == "of":  # the folder holds copies of what is in a location, and no state
            return f"{name}-copies"
        if not kind or rest.partition(" ")[0] != str(file.stat().st_ino):
            name = token_hex(8) if kind or not name else name
            with replacing(file) as aside:
                aside.touch()
                aside.write_text(f"{name} at {aside.stat().st_ino} {file.parent}", encoding="utf-8")
    return name


def _check_conditions(location: Location) -> None:
    """See that the store refuses to write what is there, before anything relies on it.

    Raises:
        ConfigurationError: it writes all the same.
    """
    name = f"probe-{token_hex(8)}"
    try:
        location.create(name, b"1")
        if location.create(name, b"2"):
            raise ConfigurationError(
                f"{location.url}: the store wrote an object that was there, expected it to refuse "
                "(`If-None-Match: *`). Two machines would overwrite each other; use a store that "
                "knows conditional writes, such as Amazon's, MinIO or SeaweedFS. Nothing was begun"
            )
    finally:
        location.remove([name])


def check_state(settings: Settings) -> None:
    """See that this process works on the state of the platform that gave it work.

    Nothing is expected of processes that no platform started.

    Raises:
        ConfigurationError: it works on another one.
        TransientError, StorageError: as `state_identity`.
    """
    expected = os.environ.get(EXPECTED)
    if expected and (seen := state_identity(settings)) != expected:
        raise ConfigurationError(not_shared(seen, expected, settings))


def not_shared(seen: str, expected: str, settings: Settings) -> str:
    """The sentence about a worker of another state."""
    parts = {"location": "FALAJ_STATE", "database": "FALAJ_DATABASE_URL"}
    pairs = zip(parts.items(), seen.split("."), expected.split("."), strict=True)
    wrong = {what: variable for (what, variable), mine, theirs in pairs if mine != theirs}
    where = settings.location.url if settings.location else settings.home
    return (
        f"this process works on another state than its platform: {' and '.join(wrong)} differ. It "
        f"has {where}, identity {seen}; the platform has identity {expected}. Give its worker the "
        f"platform's {' and '.join(wrong.values())} (`falaj config` on the platform's machine "
        "shows them), or let both work on one state folder; or stop it. Nothing was done"
    )
