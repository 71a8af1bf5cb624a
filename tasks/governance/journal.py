"""The journal of an installation: who did what, to what, and how it ended; refusals too.

One JSON line an act, appended to `journal-<year>-<month>.jsonl` by any number of processes and use
cases. Each line has a number and carries the digest of the line before it, over file borders, and
`head.json` the newest one's, signed: a line that was changed, removed or put in between is noticed.
The next line never heals what was broken: where the newest line is not the one that the head names,
it names the head's. Lines name views, services, models, windows, counts and people, never a key or
a value of a row.

Whoever may write the folder and sign can still make a whole new chain. It is found where heads are
shipped to a place of their own, which `FALAJ_AUDIT` names: each is created there under the next
number, once a second and at the end of a process, and none is ever written anew. Two copies of one
journal that both go on meet there, and the second one is refused.

A journal begins with a line that names the trails of use cases that were kept before there was one
journal, and the digest of each; it is named by the beginning of its own digest.
"""

import atexit
import getpass
import hashlib
import json
import logging
import os
import socket
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.kernel.errors import (
    ArtifactError,
    StorageError,
    TransientError,
    refused_writes_explained,
)
from tasks.kernel.files import private_folder
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.store import JOURNAL, Signature
from tasks.kernel.location import Location
from tasks.kernel.settings import USE_CASES, append, bring, children, put
from tasks.metadata.database import held_everywhere

AUDIT = "FALAJ_AUDIT"
"""Variable with the location to which heads are shipped."""
BEGINNING = "0" * 64
"""What the first line names as the one before it."""
BEGIN = "begin-journal"
"""Action of a journal's first line."""
ID_LENGTH = 16
FILE_MODE = 0o600
SHIP_EVERY_S, SHIP_AGAIN_AFTER_S, SHIP_WITHIN_S = 1.0, 60.0, 3
FLOW_RUN: ContextVar[str | None] = ContextVar("falaj_flow_run", default=None)
"""Id of the flow run on whose behalf this process works; a task sets it."""

logger = logging.getLogger(__name__)
_next_ships_s: dict[Path, float] = {}
_checked: set[Path] = set()


@dataclass(frozen=True)
class JournalLine:
    """One line as it is stored in the file."""

    file: str
    position: int
    text: bytes

    @property
    def digest(self) -> str:
        """What the next line names."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def content(self) -> dict[str, Any]:
        """What it says; empty where the line was cut off or spoilt."""
        try:
            content = json.loads(self.text)
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}


class Head(BaseModel):
    """What is signed of a journal: its newest line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    journal: str
    """Names it; that of a copy which went on by itself begins with the name it had."""
    number: int
    digest: str
    time: str = ""
    key_id: str = ""
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """The bytes that the signature is of."""
        return json.dumps([self.journal, self.number, self.digest, self.time]).encode()

    @property
    def signed_by(self) -> Signature:
        """The signature and its key."""
        return Signature(self.key_id, b64decode(self.signature))

    @classmethod
    def of(cls, text: bytes) -> "Head | None":
        """The head that a file or an object holds; None where it holds none."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None


class Journal:
    """The lines of a state, in its folder `audit`, which only its owner may enter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = key_store(folder.parent)

    @contextmanager
    def recorded(self, action: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Write a line when the block ends, with its outcome and duration.

        Yields the facts, to which the block may add. A journal that cannot be written refuses the
        act before it begins.

        Raises:
            StorageError: the disk refused the line.
            ArtifactError: see `append`.
        """
        with self._writing():
            self._check_alone()
        started = time.monotonic()
        outcome = "ok"
        try:
            yield facts
        except BaseException as exc:
            outcome = f"failed: {type(exc).__name__}"
            raise
        finally:
            seconds = round(time.monotonic() - started, 3)
            with self._writing():
                self._add(action, {"outcome": outcome, "seconds": seconds, **facts})

    def append(self, action: str, **facts: Any) -> None:
        """Append one line, whole, behind the last one of whatever process wrote it.

        Raises:
            StorageError: the disk refused the line.
            TransientError: the key store does not answer. No line was written.
            ArtifactError: a copy of this journal went on elsewhere. No line was written.
        """
        with self._writing():
            self._check_alone()
            self._add(action, facts)

    def begin(self, reason: str) -> str:
        """Go on under a name of its own, as a copy of a journal that goes on elsewhere.

        Returns:
            The new name.
        """
        with self._writing():
            left = self._newest_head()
            where = {"left": left.model_dump()} if left else {"trails": self._earlier_trails()}
            return self._add(BEGIN, {"reason": reason, **where}).journal

    def ship(self) -> Head | None:
        """Ship the newest head now, wherever `FALAJ_AUDIT` says; None where there is none.

        Raises:
            TransientError, StorageError: the location does not answer, or refuses.
            ArtifactError: see `append`.
        """
        if (location := shipping_location()) is None:
            return None
        with self._writing():
            if head := read_head(self.folder):
                self._look(location, head)
                self._ship(location, head)
                self._look(location, head)
            return head

    def lines(self, kind: str = "journal") -> Iterator[JournalLine]:
        """All lines, oldest first.

        Args:
            kind: beginning of the names of its files.
        """
        for file in self._files(kind):
            with file.open("rb") as lines:
                for position, line in enumerate(lines, start=1):
                    yield JournalLine(file.name, position, line.removesuffix(b"\n"))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep writers out, where there was one: lines and head belong together."""
        if not children(self.folder) and not (self.folder / "lock").exists():
            yield
            return
        with held_everywhere(self.folder / "lock", shared=True):
            bring(self.folder)
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the journal; also finds out that it cannot be written, before anything is done."""
        with refused_writes_explained(self.folder):
            private_folder(self.folder)
        with held_everywhere(self.folder / "lock"):
            bring(self.folder)
            yield

    def _add(self, action: str, facts: dict[str, Any]) -> Head:
        """Sign, write and ship one line; what is signed but not written is nothing."""
        before = self._newest_head()
        if before is None and action != BEGIN:
            before = self._add(BEGIN, {"trails": self._earlier_trails()})
        now = datetime.now(UTC)
        moment = now.isoformat(timespec="microseconds")
        line = {
            "time": moment,
            "action": action,
            **{name: fact for name, fact in facts.items() if fact is not None},
            "who": facts.get("who") or process_identity(),
            "number": before.number + 1 if before else 1,
            "previous": before.digest if before else BEGINNING,
        }
        text = json.dumps(line, default=str, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        name = before.journal if before else ""
        name = name_of(name, digest) if action == BEGIN else name
        head = self._signed(Head(journal=name, number=line["number"], digest=digest, time=moment))
        newest = max([f"journal-{now:%Y-%m}.jsonl", *(f.name for f in self._files()[-1:])])
        append(self.folder / newest, [text], mode=FILE_MODE)
        put(self.folder / "head.json", head.model_dump_json())
        self._ship_in_time(head)
        return head

    def _signed(self, head: Head) -> Head:
        by = self.keys.sign(JOURNAL, head.signed)
        signature = b64encode(by.der).decode()
        return head.model_copy(update={"key_id": by.key_id, "signature": signature})

    def _newest_head(self) -> Head | None:
        """What the next line follows: the newest line, where the head vouches for it.

        A process that was killed between a line and the head leaves the head one line behind.
        Otherwise lines were changed or removed since the last act, and naming what is left would
        make the chain whole again. None before the first line.
        """
        head, last = read_head(self.folder), self._newest_line()
        content = last.content if last else {}
        digest, begins = (last.digest if last else ""), content.get("action") == BEGIN
        if head is None:
            if not isinstance(number := content.get("number"), int):
                return None
            if begins and number == 1:
                return Head(journal=name_of("", digest), number=1, digest=digest)
            name = ""
            for line in self.lines():
                name = name_of(name, line.digest) if line.content.get("action") == BEGIN else name
            return Head(journal=name, number=number, digest=BEGINNING)
        if (content.get("previous"), content.get("number")) != (head.digest, head.number + 1):
            return head
        name = name_of(head.journal, digest) if begins else head.journal
        return Head(journal=name, number=head.number + 1, digest=digest)

    def _newest_line(self, kind: str = "journal") -> JournalLine | None:
        for file in reversed(self._files(kind)):
            if found := _last_line(file):
                return JournalLine(file.name, 0, found)
        return None

    def _files(self, kind: str = "journal") -> list[Path]:
        return sorted(self.folder.glob(f"{kind}-*.jsonl"))

    def _earlier_trails(self) -> dict[str, str]:
        """Digest of the newest line of each trail of before, by its folder in the state."""
        found = {}
        for folder in earlier_folders(self.folder.parent):
            if last := Journal(bring(folder))._newest_line("features"):
                head = _content(folder / "head.json").get("digest")
                is_newest = head in (last.digest, last.content.get("previous"))
                digest = last.digest if is_newest else str(head or BEGINNING)
                found[folder.relative_to(self.folder.parent).as_posix()] = digest
        return found

    def _check_alone(self) -> None:
        """Refuse where a copy went on elsewhere; asked once a process, and where it showed."""
        head = read_head(self.folder)
        waits = time.monotonic() < _next_ships_s.get(self.folder, 0)
        if self.folder in _checked or head is None or waits:
            return
        if location := shipping_location():
            try:
                self._look(location, head)
            except (TransientError, StorageError) as exc:
                self._wait(exc)

    def _ship_in_time(self, head: Head) -> None:
        """Ship a head, if none was shipped just now; nothing that happens there stops the act."""
        if (location := shipping_location()) is None:
            return
        if self.folder not in _next_ships_s:
            atexit.register(self._ship_last)
        if time.monotonic() < _next_ships_s.setdefault(self.folder, 0):
            return
        try:
            self._ship(location, head)
            _next_ships_s[self.folder] = time.monotonic() + SHIP_EVERY_S
        except (TransientError, StorageError) as exc:
            self._wait(exc)

    def _ship_last(self) -> None:
        try:
            self.ship()
        except (TransientError, StorageError, ArtifactError) as exc:
            logger.warning("%s", exc)

    def _wait(self, exc: Exception) -> None:
        _next_ships_s[self.folder] = time.monotonic() + SHIP_AGAIN_AFTER_S
        logger.warning("no head of the journal was shipped, the act goes on: %s", exc)

    def _ship(self, location: Location, head: Head) -> None:
        """Create a head under the next number; where that is taken, the next act asks why."""
        number, line = self._shipped(location, head)
        if line == head.number:
            return
        name = shipped_name(head.journal, number + 1)
        if location.create(name, head.model_dump_json().encode()):
            self._note_shipped(location, head, number + 1)
            return
        _checked.discard(self.folder)
        logger.warning("%s/%s is there already; the next act finds out why", location, name)

    def _look(self, location: Location, head: Head) -> None:
        """See that what is shipped beyond what we know of is ours.

        A process that was killed after it shipped a head left it unnoted.

        Raises:
            ArtifactError: it is not.
        """
        while True:
            number = self._shipped(location, head)[0] + 1
            text = location.read(name := shipped_name(head.journal, number))
            if text is None:
                _checked.add(self.folder)
                return
            there = Head.of(text)
            if there is None or there.digest not in (line.digest for line in self.lines()):
                raise ArtifactError(
                    f"the journal in {self.folder} ends at line {head.number}, and {location}/"
                    f"{name} names line {there.number if there else 0} of the same journal, which "
                    "is not in it: a copy of this state went on elsewhere, or lines were removed "
                    "here. Nothing was done. If this is a restored state that is to go on by "
                    "itself, run `falaj audit begin`; `falaj audit verify` says what differs"
                )
            self._note_shipped(location, there, number)

    def _shipped(self, location: Location, head: Head) -> tuple[int, int]:
        """Number of the newest head that was shipped there, and of its line."""
        noted = _content(self.folder / "shipped.json")
        if (noted.get("location"), noted.get("journal")) != (location.url, head.journal):
            return 0, 0
        return int(noted["number"]), int(noted["line"])

    def _note_shipped(self, location: Location, head: Head, number: int) -> None:
        noted = {"location": location.url, "journal": head.journal, "number": number}
        put(self.folder / "shipped.json", json.dumps({**noted, "line": head.number}))


def shipping_location() -> Location | None:
    """Where heads are shipped; None where `FALAJ_AUDIT` is not set.

    Raises:
        ConfigurationError: it is no location.
    """
    url = os.environ.get(AUDIT)
    return Location.of(url, AUDIT, SHIP_WITHIN_S) if url else None


def shipped_name(journal: str, number: int) -> str:
    """Name of the object that holds a shipped head."""
    return f"heads/{journal}/{number:012d}"


def name_of(before: str, digest: str) -> str:
    """Name of a journal that begins with a line of this digest."""
    return f"{before}.{digest[:ID_LENGTH]}".lstrip(".")


def earlier_folders(home: Path) -> list[Path]:
    """Where trails were before there was one journal."""
    return [home / "audit", *(each / "audit" for each in children(home / USE_CASES))]


def process_identity() -> dict[str, Any]:
    """Who works outside a server: the operating system's user, host and process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        user = str(os.getuid())
    return {"user": user, "host": socket.gethostname(), "process": os.getpid()}


def flow_run_id() -> str | None:
    """Id of the flow run that this process belongs to, if any."""
    return FLOW_RUN.get() or os.environ.get("PREFECT__FLOW_RUN_ID") or None


@contextmanager
def on_behalf_of(flow_run: str | None) -> Iterator[None]:
    """Lines inside the block carry this flow run's id."""
    token = FLOW_RUN.set(flow_run)
    try:
        yield
    finally:
        FLOW_RUN.reset(token)


def read_head(folder: Path) -> Head | None:
    """The head of a journal; None where it is missing or spoilt, or of a trail of before."""
    try:
        return Head.of((folder / "head.json").read_bytes())
    except OSError:
        return None


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _last_line(file: Path) -> bytes:
    """The last line, found from the end: the file may be long."""
    block = 8192
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        while True:
            start = max(0, size - block)
            stream.seek(start)
            before, _, last = stream.read().rstrip(b"\n").rpartition(b"\n")
            if before or start == 0:
                return last
            block *= 2
