"""The audit trail: who did what to which features, and who answered for which model.

Each use case has a trail of what is done with its feature store. The one in the state folder itself
also holds people's answers to promotions, of every use case: the model registry is shared.

One JSON line an act, appended to `features-<year>-<month>.jsonl` by any number of processes. Each
line carries the digest of the line before it, over file borders, and `head.json` that of the last
one, so a line that was changed, removed or put in between is noticed. The next line never heals
what was broken: where the newest line is not the one that the head names, it names the head's.
Whoever may write the folder can still make a whole new chain: send the lines, or the head's digest
now and then, to a place of its own. Lines name views, services, models, windows, counts and people,
never a key or a value of a row.
"""

import getpass
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.files import private_folder
from tasks.kernel.settings import append, bring, children, put
from tasks.metadata.database import held_everywhere

BEGINNING = "0" * 64
"""What the first line names as the one before it."""

FILE_MODE = 0o600
FLOW_RUN: ContextVar[str | None] = ContextVar("falaj_flow_run", default=None)
"""Id of the flow run on whose behalf this process works; a task sets it."""


@dataclass(frozen=True)
class JournalLine:
    """One line as it is stored in the file."""

    file: str
    number: int
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


@dataclass(frozen=True)
class JournalResult:
    """Whether the chain is whole."""

    num_lines: int
    head: str
    faults: tuple[str, ...]


class Journal:
    """Audit lines in one folder, which only its owner may enter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def recorded(self, action: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Write a line when the block ends, with its outcome and duration.

        Yields the facts, to which the block may add. A trail that cannot be written refuses the act
        before it begins.

        Raises:
            StorageError: the disk refused the line.
        """
        with self._writing():
            pass
        started = time.monotonic()
        outcome = "ok"
        try:
            yield facts
        except BaseException as exc:
            outcome = f"failed: {type(exc).__name__}"
            raise
        finally:
            seconds = round(time.monotonic() - started, 3)
            self.append(action, outcome=outcome, seconds=seconds, **facts)

    def append(self, action: str, **facts: Any) -> None:
        """Append one line, whole, behind the last one of whatever process wrote it."""
        now = datetime.now(UTC)
        with self._writing():
            previous = self._previous()
            line = {
                "time": now.isoformat(timespec="microseconds"),
                "action": action,
                **{name: fact for name, fact in facts.items() if fact is not None},
                "who": facts.get("who") or process_identity(),
                "previous": previous,
            }
            text = json.dumps(line, default=str, separators=(",", ":"))
            append(self.folder / f"features-{now:%Y-%m}.jsonl", [text], mode=FILE_MODE)
            self._move_head(hashlib.sha256(text.encode()).hexdigest())

    def lines(self) -> Iterator[JournalLine]:
        """All lines, oldest first."""
        for file in self._files():
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    yield JournalLine(file.name, number, line.removesuffix(b"\n"))

    def verify(self) -> JournalResult:
        """Follow the chain from the first line to the head.

        A process that was killed between a line and the head leaves the head one line behind;
        that is no fault. Acts of other processes wait meanwhile.
        """
        faults: list[str] = []
        digests = [BEGINNING]
        with self._reading():
            for line in self.lines():
                named = line.content.get("previous")
                if named is None:
                    faults.append(f"{line.file} line {line.number} is cut off or is no audit line")
                elif named != digests[-1]:
                    faults.append(
                        f"{line.file} line {line.number} does not follow the line before it: one "
                        "was changed, removed or put in between"
                    )
                digests.append(line.digest)
            head = _read_head(self.folder)
        if head is None and len(digests) > 1:
            faults.append("head.json is missing or spoilt: the newest lines cannot be vouched for")
        elif head is not None and head not in digests[-2:]:
            faults.append("the newest lines are missing: the head names a line that is not there")
        return JournalResult(len(digests) - 1, digests[-1], tuple(faults))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the trail; also finds out that it cannot be written, before anything is done."""
        with refused_writes_explained(self.folder):
            private_folder(self.folder)
        with held_everywhere(self.folder / "lock"):
            bring(self.folder)
            yield

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Keep writers out, where there was one: lines and head belong together."""
        if not children(self.folder) and not (self.folder / "lock").exists():
            yield
            return
        with held_everywhere(self.folder / "lock", shared=True):
            bring(self.folder)
            yield

    def _move_head(self, digest: str) -> None:
        head = {"digest": digest, "time": datetime.now(UTC).isoformat(timespec="microseconds")}
        put(self.folder / "head.json", json.dumps(head))

    def _previous(self) -> str:
        """What the next line names: the newest line, where the head vouches for it.

        The head may be one line behind (see `verify`). Otherwise lines were changed or removed
        since the last act, and naming what is left would make the chain whole again.
        """
        newest, head = self._newest_digests(), _read_head(self.folder)
        if head is None and newest == [BEGINNING]:
            self._move_head(BEGINNING)  # so that lines without a head are always a fault
            head = BEGINNING
        return newest[-1] if head in newest else head or BEGINNING

    def _newest_digests(self) -> list[str]:
        """Digests of the last line and the one before it, the last one last."""
        lines: list[bytes] = []
        for file in reversed(self._files()):
            lines = _last_lines(file, 2 - len(lines)) + lines
            if len(lines) == 2:
                break
        return [BEGINNING, *(hashlib.sha256(line).hexdigest() for line in lines)][-2:]

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("features-*.jsonl"))


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
    """Audit lines inside the block carry this flow run's id."""
    token = FLOW_RUN.set(flow_run)
    try:
        yield
    finally:
        FLOW_RUN.reset(token)


def _read_head(folder: Path) -> str | None:
    try:
        head = json.loads((folder / "head.json").read_text())
        return str(head["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_lines(file: Path, count: int) -> list[bytes]:
    """The last lines, found from the end: the file may be long."""
    block = 8192
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        while True:
            start = max(0, size - block)
            stream.seek(start)
            lines = stream.read().rstrip(b"\n").split(b"\n")
            if len(lines) > count or start == 0:
                return [line for line in lines[-count:] if line]
            block *= 2
