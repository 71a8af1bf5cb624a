"""API keys: made once, shown once, kept as digests.

A key is `falaj_<id>_<secret>`, its secret 256 random bits, so one SHA-256 is enough: there is
nothing to guess that a slow digest would protect.
"""

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import AwareDatetime, ValidationError

from serving.errors import EndedError, UnauthorizedError
from serving.security.config import Grant
from tasks.kernel.errors import ConfigurationError, refused_writes_explained
from tasks.kernel.files import file_state, locked, write_atomically
from tasks.kernel.values import Contract

LOGGER = logging.getLogger(__name__)

_KEY = re.compile(r"falaj_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class ApiKey(Contract):
    """What is kept of a key: nothing that would let anybody in.

    Attributes:
        id: the part of the key that names it; no secret.
        digest: SHA-256 of the whole key, hexadecimal.
    """

    id: str
    digest: str
    subject: str
    tenant: str = ""
    grants: tuple[Grant, ...]
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def state(self, now: datetime) -> str:
        """`valid`, `expired` or `revoked`."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "valid"


class _File(Contract):
    keys: tuple[ApiKey, ...] = ()


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """All keys of a file; none where there is no file.

    Raises:
        ConfigurationError: it cannot be read, or others may write it.
    """
    try:
        if file.stat().st_mode & 0o022:
            raise ConfigurationError(f"{file} may be written by others than its owner; chmod 600")
        return _File.model_validate_json(file.read_bytes()).keys
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as exc:
        raise ConfigurationError(f"{file} holds no API keys: {exc}") from exc


def create_key(
    file: Path,
    subject: str,
    grants: tuple[Grant, ...],
    tenant: str = "",
    expires: datetime | None = None,
) -> tuple[str, ApiKey]:
    """A new key, which nobody can show again, and what was kept of it."""
    name = secrets.token_hex(6)
    text = f"falaj_{name}_{secrets.token_urlsafe(32)}"
    made = ApiKey(
        id=name,
        digest=_digest(text.encode()),
        subject=subject,
        tenant=tenant,
        grants=grants,
        created=datetime.now(UTC),
        expires=expires,
    )
    with _changing(file):
        _write(file, (*read_keys(file), made))
    return text, made


def revoke_key(file: Path, name: str) -> ApiKey:
    """Refuse a key from now on.

    Raises:
        ConfigurationError: there is none of this id.
    """
    with _changing(file):
        keys = {key.id: key for key in read_keys(file)}
        if name not in keys:
            known = ", ".join(keys) or "none"
            raise ConfigurationError(f"{file} has no key {name}; it has: {known}")
        if keys[name].revoked is None:
            keys[name] = keys[name].model_copy(update={"revoked": datetime.now(UTC)})
            _write(file, tuple(keys.values()))
        return keys[name]


class KeyRing:
    """The keys of a file, read again when it changes.

    Args:
        on_change: called when what a key means may have changed.
    """

    def __init__(self, file: Path, on_change: Callable[[], None] = lambda: None) -> None:
        self._file = file
        self._on_change = on_change
        self._seen = file_state(file)
        self._keys = {key.id: key for key in read_keys(file)}

    def look(self) -> None:
        """Read the file again where it has changed."""
        seen = file_state(self._file)
        if seen != self._seen:
            # One that says nothing any more lets nobody in: a revoked key might stand in it.
            self._keys, self._seen = {}, seen
            try:
                self._keys = {key.id: key for key in read_keys(self._file)}
            except ConfigurationError:
                LOGGER.exception("no API key is accepted until %s is mended", self._file)
            self._on_change()

    def find(self, presented: bytes) -> ApiKey:
        """The key that was presented.

        Raises:
            UnauthorizedError: it is none.
            EndedError: it is not valid any more.
        """
        match = _KEY.fullmatch(presented.decode("latin-1"))
        key = self._keys.get(match[1]) if match else None
        # The digest is made and compared in either case, so that time says nothing of ids.
        expected = key.digest if key else "0" * 64
        if not hmac.compare_digest(_digest(presented), expected) or key is None:
            raise UnauthorizedError("the API key is not known here")
        if (state := key.state(datetime.now(UTC))) != "valid":
            raise EndedError(f"the API key {key.id} is {state}; ask for a new one")
        return key


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _write(file: Path, keys: tuple[ApiKey, ...]) -> None:
    write_atomically(file, _File(keys=keys).model_dump_json(indent=1) + "\n", private=True)


@contextmanager
def _changing(file: Path) -> Iterator[None]:
    """Hold the lock of a file of keys, so that two commands do not lose each other's keys."""
    with refused_writes_explained(file), locked(file.parent / f".{file.name}.lock"):
        yield
