"""Where state is shared: a folder, or a prefix of an S3 bucket, that any number of machines reach.

An object appears whole under its name, or never. Two of three ways to write one ask the store
first: `create` where nothing may be there yet, `change` where nobody may have written since. S3
decides both (`If-None-Match`, `If-Match`), in a folder a lock does. Content lies under its SHA-256,
so the same bytes are kept once and are sent only where they are missing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import unquote, urlsplit

from tasks.kernel import errors, files
from tasks.kernel.keys import envelope
from tasks.kernel.keys.address import KEYS
from tasks.kernel.keys.encryption import ENCRYPTION, encryption
from tasks.kernel.keys.envelope import Envelopes

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta, UpdateVersion
    from obstore.store import ObjectStore

EXPECTED = "expected file:///folder or s3://bucket/prefix, `#` in it written as %23"
OBJECTS = "objects"
# How long a store may send nothing; and until it has a large object, 256 MB at 1.7 Mbit/s.
SILENCE_LIMIT_S, UPLOAD_LIMIT_S = 60, 1200
RETRIES = 8
# How long a request is tried again whose store does not answer, or answers that it is busy.
RETRY_LIMIT_S = 60
# Larger ones go in parts; what a killed process leaves of these a lifecycle rule has to remove.
WHOLE_UPLOAD_BYTES = 256_000_000
CHUNK_BYTES = 8_000_000
CHANGE_ATTEMPTS = 50
AccessName = Literal["endpoint", "region", "access_key_id", "secret_access_key", "session_token"]
MEND = "Remove it, and run the stage that makes it again, or bring a backup with `falaj restore`"
# S3 takes 10,000 parts; some more are kept free.
MOST_PARTS = 9_000
# In the text of an error, since obstore has no class for it.
_CUT = "InvalidRange"
_REFUSALS = {
    "NoSuchBucket": "there is no such bucket{}; make it, or correct its name or AWS_ENDPOINT_URL. "
    "Nothing was changed",
    "RequestTimeTooSkewed": "the clocks of this machine and of the store differ by too much{}; set "
    "this machine's clock, best by NTP, and run again. Nothing was changed",
    r"169\.254\.169\.254": "there is no key, and this machine has no role{}; set AWS_ACCESS_KEY_ID "
    "and AWS_SECRET_ACCESS_KEY (~/.aws is read for raw data alone). Nothing was changed",
    "status code: 507|InsufficientStorage|No space left|os error (28|122)|QuotaExceeded|"
    "StorageFull": "the store is full{}; free space in it (`falaj prune` shows what may go) and "
    "run again. What was there is unchanged",
    r"(?s)LocalFileSystem.*code: (1|13|30),": "this user may not read or write there{}; expected "
    "a folder of this user's, or of a group of it, mounted for writing. Mend its owner or mode, or "
    "name another one. Nothing was changed",
}


@dataclass(frozen=True)
class Entry:
    """One object of a listing."""

    num_bytes: int
    changed: datetime
    tag: str
    """Of S3, the MD5 of what was uploaded in one piece; otherwise says nothing."""


@dataclass(frozen=True)
class Location:
    """Objects below one URL. A name is relative, with slashes.

    Args:
        url: without a slash at its end.
        access: what `s3_access` gives; None: from this process's variables.
        patience_s: how long a request is tried again; silence is borne in proportion.

    Where encryption is on, objects are envelopes; names stay readable, and sizes are those of the
    content.
    """

    url: str
    access: Mapping[AccessName, str] | None = field(default=None, repr=False, compare=False)
    plain: bool = False
    """Never encrypt: others read it without our keys, or it is the state folder itself."""
    patience_s: float = RETRY_LIMIT_S

    def __str__(self) -> str:
        return self.url

    @classmethod
    def of(cls, url: str, variable: str = "FALAJ_STATE") -> Location:
        """The location that a setting names.

        Raises:
            ConfigurationError: it is no address of a folder or of S3, or holds a password.
        """
        parts = urlsplit(url)
        known = {"s3": parts.netloc, "file": not parts.netloc and parts.path.strip("/")}
        if (
            not known.get(parts.scheme)
            or parts.username
            or parts.query
            or parts.fragment
            or ".." in unquote(parts.path).split("/")
        ):
            raise errors.ConfigurationError(
                f"{variable} is {parts.scheme}://{parts.hostname or ''}{parts.path}; {EXPECTED}. "
                "Keys of S3 come from the variables AWS_*. Nothing was touched"
            )
        return cls(url.rstrip("/"))

    @property
    def folder(self) -> Path | None:
        """Its folder, where it is one."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Content of a small object, or some bytes of one; None where there is none.

        Raises:
            ArtifactError: it ends before `start`.
        """
        with suppress(FileNotFoundError), self._explained(name):
            if length is None:
                return self._content(name, bytes(self._store.get(name).bytes()))
            if self._envelopes:
                return self._opened_part(self._envelopes, name, start, length)
            return bytes(self._store.get_range(name, start=start, length=length))
        return None

    def _opened_part(self, envelopes: Envelopes, name: str, start: int, length: int) -> bytes:
        """Some bytes of the content of an envelope, by two requests."""
        found = self._store.get(name, options={"range": (0, envelope.HEADER_BYTES)})
        header, total = bytes(found.bytes()), found.meta["size"]
        size = envelope.content_bytes(total)
        end = min(size, start + length)
        if start > size >= 0:
            raise errors.ArtifactError(f"{self.url}/{name} is shorter than it was. {MEND}")
        first, last = envelope.sealed_range(start, end)
        options = {"range": (first, min(last, total)), "if_match": found.meta["e_tag"]}
        rest = self._store.get(name, options=cast("GetOptions", options)) if size >= 0 else None
        body = bytes(rest.bytes()) if rest else b""

        def fetch(at: int, number: int) -> bytes:
            return header if at == 0 else body[at - first : at - first + number]

        content = b""
        for chunk in envelopes.open(name, total, fetch, start):
            content += chunk
            if len(content) >= end - start:
                break
        return content[: end - start]

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none."""
        with suppress(FileNotFoundError), self._explained(name):
            size = int(self._store.head(name)["size"])
            return envelope.content_bytes(size) if self._envelopes else size
        return None

    def write(self, name: str, content: bytes | Path) -> None:
        """Put an object in the place of what is there."""
        with self._explained(name):
            size = content.stat().st_size if isinstance(content, Path) else len(content)
            limit_s = SILENCE_LIMIT_S if size <= CHUNK_BYTES else UPLOAD_LIMIT_S
            store, in_parts = self._to_write(limit_s), size >= WHOLE_UPLOAD_BYTES
            sealed: bytes | Path | Iterator[bytes] = content
            if self._envelopes:
                sealed = self._envelopes.seal(name, _pieces(content))
                in_parts = size > CHUNK_BYTES  # what comes in pieces is else held as a whole
                sealed = sealed if in_parts else b"".join(sealed)
            store.put(name, sealed, use_multipart=in_parts, chunk_size=part_bytes(size))

    def _sealed(self, name: str, content: bytes) -> bytes:
        found = self._envelopes
        return b"".join(found.seal(name, [content])) if found else content

    def create(self, name: str, content: bytes) -> bool:
        """Write an object that nobody has written; False where somebody has."""
        from obstore.exceptions import AlreadyExistsError

        with self._explained(name):
            try:
                store = self._to_write(SILENCE_LIMIT_S)
                store.put(name, self._sealed(name, content), mode="create", use_multipart=False)
            except AlreadyExistsError:
                # Of a request that was sent again, as its answer was lost, the first one may have
                # written it.
                return self.read(name) == content
            return True

    def change(self, name: str, make: Callable[[bytes | None], bytes]) -> bytes:
        """Replace a small object by what `make` makes of it; it may be called several times.

        Raises:
            TransientError: others changed it each time.
        """
        if self.folder is not None:
            with files.locked(self.folder / f"{name}.lock"):
                made = make(self.read(name))
                self.write(name, made)
                return made
        for _ in range(CHANGE_ATTEMPTS):
            if (new := self._changed(name, make)) is not None:
                return new
        raise errors.TransientError(
            f"{self.url}/{name}: others changed it {CHANGE_ATTEMPTS} times; try again"
        )

    def _changed(self, name: str, make: Callable[[bytes | None], bytes]) -> bytes | None:
        from obstore.exceptions import PreconditionError

        with self._explained(name):
            try:
                seen = self._store.get(name)
            except FileNotFoundError:
                new = make(None)
                return new if self.create(name, new) else None
            version: UpdateVersion = {"e_tag": seen.meta["e_tag"]}
            old = self._content(name, bytes(seen.bytes()))
            if (new := make(old)) == old:
                return new
            try:
                sealed = self._sealed(name, new)
                self._store.put(name, sealed, mode=version, use_multipart=False)
            except PreconditionError:
                return new if self.read(name) == new else None
            return new

    def _content(self, name: str, there: bytes) -> bytes:
        if not self._envelopes:
            return self._readable(name, there)
        found = self._envelopes.open(name, len(there), lambda at, number: there[at : at + number])
        return b"".join(found)

    def _readable(self, name: str, there: bytes) -> bytes:
        """See that content is not encrypted, where nothing is decrypted."""
        if not self.plain and envelope.is_envelope(there):
            raise errors.ConfigurationError(
                f"{self.url}/{name} is encrypted, and encryption is off here; set {ENCRYPTION} to "
                f"the name of its key and {KEYS} to the address of the key store. Nothing was read"
            )
        return there

    def bring(self, name: str, target: Path, *, sha256: str | None = None) -> None:
        """Stream an object into a file, which appears whole.

        Args:
            sha256: digest that its content must have.

        Raises:
            FileNotFoundError: there is no such object.
            ArtifactError: its content has another digest.
        """
        seen = hashlib.sha256()
        with self._explained(name), files.replacing(target, durable=False) as aside:
            with aside.open("wb") as stream:
                for chunk in self._chunks(name):
                    seen.update(chunk)
                    stream.write(chunk)
            if sha256 and seen.hexdigest() != sha256:
                raise errors.ArtifactError(
                    f"{self.url}/{name} has SHA-256 {seen.hexdigest()[:12]}, expected "
                    f"{sha256[:12]}: it was changed or damaged. {MEND}"
                )

    def _chunks(self, name: str) -> Iterator[bytes]:
        """Content of an object, piece by piece."""
        if not self._envelopes:
            pieces = self._stored(name, self._store.get(name))
            return chain([self._readable(name, next(pieces, b""))], pieces)
        found = self._store.get(name)
        stored, waiting = self._stored(name, found), b""

        def fetch(_: int, number: int) -> bytes:
            nonlocal waiting
            while len(waiting) < number and (piece := next(stored, b"")):
                waiting += piece
            taken, waiting = waiting[:number], waiting[number:]
            return taken

        return self._envelopes.open(name, found.meta["size"], fetch)

    def _stored(self, name: str, found: GetResult) -> Iterator[bytes]:
        """An object as it is; where an answer breaks off, the rest of the same is asked for."""
        from obstore.exceptions import GenericError

        done, breaks = 0, 0
        while True:
            try:
                for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                    yield bytes(chunk)
                    done, breaks = done + len(chunk), 0
                return
            except GenericError:
                if (breaks := breaks + 1) > RETRIES:
                    raise
                options = {"range": {"offset": done}, "if_match": found.meta["e_tag"]}
                found = self._store.get(name, options=cast("GetOptions", options))

    def send_content(self, path: Path) -> tuple[str, int]:
        """Bring a file's content into the location, unless it is there; its digest and size."""
        digest, num_bytes = files.digest_of(path), path.stat().st_size
        if self.size(object_name(digest)) != num_bytes:
            self.write(object_name(digest), path)
        return digest, num_bytes

    def entries(self, prefix: str) -> dict[str, Entry]:
        """Objects below `<prefix>/`, by their names."""
        with suppress(FileNotFoundError), self._explained(prefix):
            every = (meta for page in self._store.list(prefix or None) for meta in page)
            # In a folder `change` locks empty files, which are no objects.
            found = (meta for meta in every if meta["size"] or not meta["path"].endswith(".lock"))
            is_sealed = self._envelopes is not None
            return {meta["path"]: _entry(meta, is_sealed=is_sealed) for meta in found}
        return {}

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone are gone."""
        for name in names:
            with suppress(FileNotFoundError), self._explained(name):
                self._store.delete(name)

    @property
    def _envelopes(self) -> Envelopes | None:
        return None if self.plain else encryption(os.environ)

    @property
    def _store(self) -> ObjectStore:
        return self._opened(SILENCE_LIMIT_S)

    def _opened(self, limit_s: float) -> ObjectStore:
        limit_s *= self.patience_s / RETRY_LIMIT_S
        if self.folder is None:
            access = s3_access(os.environ) if self.access is None else self.access
            return _open(self.url, tuple(access.items()), limit_s, self.patience_s)
        with suppress(PermissionError):  # obstore meets it too
            if not self.folder.exists():
                raise FileNotFoundError(self.folder)
        return _open(self.url, (), limit_s, self.patience_s)

    def _to_write(self, limit_s: float) -> ObjectStore:
        """Its folder is made by the first write, not by a look."""
        if self.folder is not None:
            with errors.refused_writes_explained(self.folder):
                files.make_folder(self.folder)
        return self._opened(limit_s)

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Any refusal as an error of ours.

        Raises:
            TransientError: the store does not answer.
            StorageError: it refuses, or is full.
        """
        from obstore import exceptions

        where = f"{self.url}/{name}"
        try:
            yield
        except (FileNotFoundError, exceptions.BaseError) as exc:
            for seen, sentence in _REFUSALS.items():
                if re.search(seen, str(exc)):
                    reason = f" ({_reason(exc)})"
                    raise errors.StorageError(f"{where}: {sentence.format(reason)}") from exc
            if isinstance(exc, FileNotFoundError):
                raise
            if _CUT in str(exc):
                raise errors.ArtifactError(f"{where} is shorter than it was. {MEND}") from exc
            if isinstance(exc, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
                raise errors.StorageError(
                    f"{where}: the store refused the key ({_reason(exc)}); expected one that may "
                    "list, read, write and delete there. Mend AWS_ACCESS_KEY_ID, "
                    "AWS_SECRET_ACCESS_KEY or the bucket's policy; nothing was changed"
                ) from exc
            raise errors.TransientError(
                f"{where}: the store does not answer as expected ({_reason(exc)}), "
                f"tried up to {RETRIES + 1} times. Nothing half written is visible; run again then"
            ) from exc


def _entry(meta: ObjectMeta, *, is_sealed: bool) -> Entry:
    if is_sealed:
        return Entry(envelope.content_bytes(meta["size"]), meta["last_modified"], "")
    return Entry(meta["size"], meta["last_modified"], (meta["e_tag"] or "").strip('"'))


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            yield piece


def part_bytes(num_bytes: int) -> int:
    """Bytes of each part in which so many are sent."""
    return max(CHUNK_BYTES, num_bytes // MOST_PARTS + 1)


def object_name(sha256: str) -> str:
    """Name of the object that holds this content."""
    return f"{OBJECTS}/{sha256[:2]}/{sha256}"


def s3_access(environment: Mapping[str, str]) -> dict[AccessName, str]:
    """Address and keys of S3 in the usual variables, by obstore's names.

    Without keys the machine's own role is asked.

    Raises:
        ConfigurationError: there is a key without its secret.
    """

    def first(*names: str) -> str:
        return next((environment[name] for name in names if environment.get(name)), "")

    found: dict[AccessName, str] = {
        "endpoint": first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "region": first("AWS_REGION", "AWS_DEFAULT_REGION"),
        "access_key_id": first("AWS_ACCESS_KEY_ID"),
        "secret_access_key": first("AWS_SECRET_ACCESS_KEY"),
        "session_token": first("AWS_SESSION_TOKEN"),
    }
    if bool(found["access_key_id"]) != bool(found["secret_access_key"]):
        raise errors.ConfigurationError(
            "one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set, the other is not; set "
            "both, or neither to use the machine's role. Nothing was started"
        )
    return {name: value for name, value in found.items() if value}


@cache
def _open(url: str, access: tuple[tuple[AccessName, str], ...], *limits_s: float) -> ObjectStore:
    from obstore.store import LocalStore, S3Store

    parts, given = urlsplit(url), dict[str, Any](access)
    if parts.scheme == "file":
        return LocalStore(unquote(parts.path))
    given.setdefault("region", "us-east-1")
    return S3Store(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        **given,
        virtual_hosted_style_request="endpoint" not in given,
        client_options={
            "allow_http": str(given.get("endpoint", "")).startswith("http://"),
            "read_timeout": timedelta(seconds=limits_s[0]),
            "timeout": timedelta(days=1),
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=limits_s[1])},
    )


def _reason(exc: Exception) -> str:
    """What the store said, without obstore's own account of its requests."""
    return " ".join(str(exc).partition("Debug source")[0].split())[:300]
