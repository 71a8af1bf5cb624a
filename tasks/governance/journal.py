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

A journal begins with a line that names the files of the trails that use cases had before there was
one journal, and the digest of each. The beginning of that line's own digest names the journal.
"""

import atexit
import hashlib
import json
import logging
import os
import pwd
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.kernel import errors
from tasks.kernel.files import digest_of, private_folder
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.store import JOURNAL
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
SHIP_EVERY_S, SHIP_AGAIN_AFTER_S, SHIP_WITHIN_S = 1.0, 60.0, 5.0
FLOW_RUN: ContextVar[str | None] = ContextVar("falaj_flow_run", default=None)
"""Id of the flow run on whose behalf this process works; a task sets it."""

logger = logging.getLogger(__name__)
# When this process may ship the next head, by folder; it is in here once it saw that it is alone.
_next_ships_s: dict[Path, float] = {}


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
    shipped: int = 0
    """How many heads were shipped."""
    key_id: str = ""
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """The bytes that the signature is of."""
        return self.model_dump_json(exclude={"key_id", "signature"}).encode()

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
            facts = {"reason": reason, "left": left.model_dump() if left else None}
            return self._add(BEGIN, facts).journal

    def ship(self) -> None:
        """Ship the newest head, as each process does when it ends; what fails is logged."""
        if (location := shipping_location()) and self.folder.is_dir():
            with self._writing():
                if head := read_head(self.folder):
                    self._put(self._shipped(location, head))

    def lines(self) -> Iterator[JournalLine]:
        """All lines, oldest first."""
        for file in self._files():
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
        with errors.refused_writes_explained(self.folder):
            private_folder(self.folder)
        with held_everywhere(self.folder / "lock"):
            bring(self.folder)
            yield

    def _add(self, action: str, facts: dict[str, Any]) -> Head:
        """Sign, write and ship one line; what is signed but not written is nothing."""
        before = self._newest_head()
        if before is None and action != BEGIN:
            before = self._add(BEGIN, {})
        if before is None:
            facts = {**facts, "trails": self._earlier_trails()}
            before = Head(journal="", number=0, digest=BEGINNING)
        now = datetime.now(UTC)
        named = {"flow_run": flow_run_id(), **facts}
        moment, number = now.isoformat(timespec="microseconds"), before.number + 1
        line = {
            "time": moment,
            "action": action,
            **{name: fact for name, fact in named.items() if fact is not None},
            "who": facts.get("who") or process_identity(),
            "number": number,
            "previous": before.digest,
        }
        text = json.dumps(line, default=str, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        name = name_of(before.journal, digest) if action == BEGIN else before.journal
        seen = {"journal": name, "number": number, "digest": digest, "time": moment}
        head = self._signed(before, seen)
        newest = max([f"journal-{now:%Y-%m}.jsonl", *(file.name for file in self._files()[-1:])])
        append(self.folder / newest, [text], mode=0o600)
        location = shipping_location()
        if location and time.monotonic() >= _next_ships_s.get(self.folder, 0):
            head = self._shipped(location, head)
        self._put(head)
        return head

    def _signed(self, head: Head, update: dict[str, Any]) -> Head:
        head = head.model_copy(update=update)
        by = self.keys.sign(JOURNAL, head.signed)
        signature = b64encode(by.der).decode()
        return head.model_copy(update={"key_id": by.key_id, "signature": signature})

    def _put(self, head: Head) -> None:
        put(self.folder / "head.json", head.model_dump_json())

    def _newest_head(self) -> Head | None:
        """What the next line follows: the newest line, where the head vouches for it.

        A process that was killed between a line and the head leaves the head one line behind.
        Otherwise lines were changed or removed since the last act, and naming what is left would
        make the chain whole again. None before the first line.
        """
        head, last = read_head(self.folder), self._newest_line()
        number = last.content.get("number") if last else None
        if last is None or not isinstance(number, int):
            return head
        if head is None:
            name = name_of("", next(self.lines()).digest)
            digest = last.digest if number == 1 else BEGINNING
            return Head(journal=name, number=number, digest=digest)
        if (last.content.get("previous"), number) != (head.digest, head.number + 1):
            return head
        begins = last.content.get("action") == BEGIN
        name = name_of(head.journal, last.digest) if begins else head.journal
        seen = {"journal": name, "number": number, "digest": last.digest}
        return head.model_copy(update=seen)

    def _newest_line(self) -> JournalLine | None:
        filled = (file for file in reversed(self._files()) if file.stat().st_size)
        found = ((file, _last_line(file)) for file in filled)
        return next((JournalLine(file.name, 0, line) for file, line in found if line), None)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("journal-*.jsonl"))

    def _earlier_trails(self) -> dict[str, str]:
        """Digests of the files that use cases wrote before there was one journal."""
        home = self.folder.parent
        folders = [self.folder, *(bring(c / "audit") for c in children(home / USE_CASES))]
        files = [file for each in folders for file in sorted(each.glob("features-*.jsonl"))]
        return {file.relative_to(home).as_posix(): digest_of(file) for file in files}

    def _check_alone(self) -> None:
        """See, once a process, that what is shipped beyond what the head says is ours.

        A process that was killed after it shipped a head left it unnoted.

        Raises:
            ArtifactError: a copy went on elsewhere.
        """
        if (location := shipping_location()) is None or self.folder in _next_ships_s:
            return
        head = read_head(self.folder)
        try:
            while head and (text := location.read(_next_name(head))):
                there = Head.of(text)
                if there is None or there.digest not in (line.digest for line in self.lines()):
                    raise errors.ArtifactError(
                        f"the journal in {self.folder} ends at line {head.number}, and {location}/"
                        f"{_next_name(head)} names a line that is not in it: a copy of this state "
                        "went on elsewhere, or lines were removed. Nothing was done. Run `falaj "
                        "audit verify`; a copy that is to go on by itself needs `falaj audit begin`"
                    )
                self._put(head := self._signed(head, {"shipped": head.shipped + 1}))
            _next_ships_s[self.folder] = 0
        except (errors.TransientError, errors.StorageError) as exc:
            self._wait(exc)
        atexit.register(self.ship)

    def _shipped(self, location: Location, head: Head) -> Head:
        """The head, created under the next number; as it was where nothing was shipped."""
        new = self._signed(head, {"shipped": head.shipped + 1})
        try:
            if location.create(_next_name(head), new.model_dump_json().encode()):
                _next_ships_s[self.folder] = time.monotonic() + SHIP_EVERY_S
                return new
            logger.warning("%s/%s is taken; the next act asks why", location, _next_name(head))
            _next_ships_s.pop(self.folder, None)
        except (errors.TransientError, errors.StorageError) as exc:
            self._wait(exc)
        return head

    def _wait(self, exc: Exception) -> None:
        _next_ships_s[self.folder] = time.monotonic() + SHIP_AGAIN_AFTER_S
        logger.warning("no head of the journal was shipped, the act goes on: %s", exc)


def shipping_location() -> Location | None:
    """Where heads are shipped; None where `FALAJ_AUDIT` is not set.

    Raises:
        ConfigurationError: it is no location.
    """
    url = os.environ.get(AUDIT)
    found = Location.of(url, AUDIT) if url else None
    # An auditor reads heads without our keys.
    return replace(found, patience_s=SHIP_WITHIN_S, plain=True) if found else None


def name_of(before: str, digest: str) -> str:
    """Name of a journal that begins with a line of this digest."""
    return f"{before}.{digest[:ID_LENGTH]}".lstrip(".")


def process_identity() -> dict[str, Any]:
    """Who works outside a server: the operating system's user, host and process."""
    user = str(os.getuid())
    with suppress(KeyError):  # a container may run under a number without a name
        user = pwd.getpwuid(os.getuid()).pw_name  # the environment may say anything
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
    file = folder / "head.json"
    return Head.of(file.read_bytes()) if file.is_file() else None


def shipped_name(journal: str, number: int) -> str:
    """Name of the object that holds a shipped head."""
    return f"heads/{journal}/{number:012d}"


def _next_name(head: Head) -> str:
    return shipped_name(head.journal, head.shipped + 1)


def _last_line(file: Path) -> bytes:
    """The last line, found from the end: the file may be long."""
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
        return content[content.rfind(b"\n", 0, -1) + 1 :].rstrip(b"\n")
