"""Which state a process works on, and a check that it is the one that it should be.

Two random names, one in the location of the state and one in the database, made by whoever comes
first. Processes that see the same two read and write the same things.
"""

import os
from secrets import token_hex

from sqlalchemy import select

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import write_atomically
from tasks.kernel.location import Location
from tasks.kernel.settings import Settings, claim
from tasks.metadata.database import insert_if_absent, open_database, transaction
from tasks.metadata.tables import identities

EXPECTED = "FALAJ_EXPECTED_STATE"
"""Variable of runs on work pools: the identity that their platform has."""
FILE = "identity"


def state_identity(settings: Settings) -> str:
    """`<name of the location>.<name of the database>`.

    Raises:
        ConfigurationError: the state folder holds copies of another location than the one that is
            set.
        TransientError, StorageError: the location or the database does not answer, or refuses.
    """
    file = settings.home / FILE
    known, _, of = (file.read_text(encoding="utf-8") if file.exists() else "").partition(" of ")
    if settings.location is not None:
        url = settings.location.url
        new = (known or token_hex(8)).encode()
        shared = settings.location.read(FILE)
        if known and (shared != new if shared else of not in ("", url)):
            there = f"is the state {shared.decode()}" if shared else "holds none"
            raise ConfigurationError(
                f"{settings.home} holds copies of the state {known}, and {url} {there}. Set "
                "FALAJ_STATE to the location of the first, or FALAJ_HOME to another folder. "
                "Nothing was changed"
            )
        if shared is None:
            _check_conditions(settings.location)
            created = settings.location.create(FILE, new)
            shared = new if created else settings.location.read(FILE) or new
        known = shared.decode()
        if of != url:
            write_atomically(file, f"{known} of {url}")
    name = known or claim(file, token_hex(8)).decode()
    with transaction(open_database(settings.metadata_url)) as connection:
        insert_if_absent(connection, identities, number=1, identity=token_hex(8))
        found = connection.execute(select(identities.c.identity)).scalar_one()
    return f"{name}.{found}"


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
