"""Whether a journal is whole: its lines, its signed head, earlier trails, and shipped heads.

The chain shows what was changed by somebody who did not, or could not, make all later lines anew.
Shipped heads show the rest: the owner of the state and of its key cannot take them back.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tasks.governance.journal import (
    BEGIN,
    BEGINNING,
    Head,
    Journal,
    JournalLine,
    earlier_folders,
    name_of,
    read_head,
    shipped_name,
    shipping_location,
)
from tasks.kernel.errors import SignatureError
from tasks.kernel.keys.store import JOURNAL, check_signature
from tasks.kernel.location import Location
from tasks.kernel.settings import bring

Trusted = Mapping[str, bytes]
READERS = 16


@dataclass(frozen=True)
class Fault:
    """What is wrong, and where."""

    kind: Literal["changed", "cut", "forked", "unsigned"]
    where: str
    """File and line, or the name of a shipped head."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where} {self.text}"


@dataclass(frozen=True)
class JournalResult:
    """Whether the chain is whole."""

    journal: str
    num_lines: int
    head: str
    faults: tuple[Fault, ...]
    num_shipped: int | None
    """Shipped heads; None where none are shipped, and whoever may sign can rewrite everything."""
    num_uncovered: int
    """Newest lines that no shipped head covers."""


@dataclass
class _Chain:
    """Lines that were followed."""

    number: int = 0
    digest: str = BEGINNING
    where: str = "its beginning"
    known: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Digest and place by number."""
    journals: dict[str, int] = field(default_factory=dict)
    """Names that the journal had, and the number of the first line of each."""
    trails: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def add(self, line: JournalLine) -> None:
        content, where = line.content, f"{line.file} line {line.position}"
        previous, number = content.get("previous"), content.get("number", self.number + 1)
        if previous is None or not isinstance(number, int):
            self.faults.append(Fault("changed", where, "is cut off or is no line of a journal"))
            return
        if (previous, number) != (self.digest, self.number + 1):
            self.faults.append(self._not_following(where, previous == self.digest, number))
        self.number, self.digest, self.where = number, line.digest, where
        self.known[number] = line.digest, where
        if content.get("action") == BEGIN:
            self.journals[name_of(self.journal, line.digest)] = number
            self.trails |= content.get("trails") or {}

    @property
    def journal(self) -> str:
        """The name it has now."""
        return next(reversed(self.journals), "")

    def _not_following(self, where: str, names_it: bool, number: int) -> Fault:
        if names_it or number == self.number + 1:
            return Fault("changed", where, f"does not follow {self.where}: one of them was changed")
        if number > self.number:
            lost = f"{self.number + 1} to {number - 1}"
            return Fault("cut", where, f"follows {self.where}, but is number {number}: {lost} lack")
        return Fault("forked", where, f"is number {number}, after number {self.number}")


def verify(journal: Journal, accepted: Collection[str] = ()) -> JournalResult:
    """Follow a journal from its first line to its head, and compare it with what was shipped.

    Other processes' acts wait meanwhile.

    Args:
        journal: of a state.
        accepted: names of journals that are known to go on elsewhere.

    Raises:
        TransientError, StorageError: the location of shipped heads does not answer, or refuses.
    """
    location, chain = shipping_location(), _Chain()
    # First, as what is shipped meanwhile is of lines that were not read.
    shipped = _shipped(location) if location else {}
    with journal.reading():
        for line in journal.lines():
            chain.add(line)
        head = read_head(journal.folder)
        trusted = journal.keys.public_keys(JOURNAL)
        faults = [*chain.faults, *_head_faults(trusted, chain, head)]
        faults += _earlier_faults(journal.folder.parent, chain.trails)
    covered = 0
    for name, heads in shipped.items():
        faults += _shipped_faults(trusted, chain, name, heads, accepted)
        ours = [h.number for h in heads.values() if h and name in chain.journals]
        covered = max([covered, *ours])
    uncovered = max(0, chain.number - covered)
    found = sum(map(len, shipped.values())) if location else None
    num_lines = len(chain.known)
    return JournalResult(chain.journal, num_lines, chain.digest, tuple(faults), found, uncovered)


def _head_faults(trusted: Trusted, chain: _Chain, head: Head | None) -> Iterator[Fault]:
    if head is None:
        if chain.number > 1:
            yield Fault("unsigned", "head.json", "is missing or spoilt: nothing vouches for lines")
        return
    yield from _signature_fault(trusted, head, "head.json")
    digest, where = chain.known.get(head.number, ("", ""))
    if head.number > chain.number:
        yield Fault("cut", chain.where, f"is the last line; head.json names line {head.number}")
    elif digest != head.digest:
        yield Fault("changed", where, "is not the line that head.json names")
    elif head.number < chain.number - 1:
        yield Fault(
            "unsigned", chain.where, f"and others follow line {head.number}, the signed one"
        )


def _signature_fault(trusted: Trusted, head: Head, where: str) -> Iterator[Fault]:
    try:
        check_signature(trusted, head.signed, head.signed_by, where)
    except (SignatureError, ValueError) as exc:
        yield Fault("unsigned", where, str(exc))


def _earlier_faults(home: Path, trails: dict[str, str]) -> Iterator[Fault]:
    """Trails of before the journal end with the lines that it names."""
    for folder in earlier_folders(home):
        name, chain = folder.relative_to(home).as_posix(), _Chain()
        for line in Journal(bring(folder)).lines("features"):
            chain.add(line)
        for fault in chain.faults:
            yield Fault(fault.kind, f"{name}/{fault.where}", fault.text)
        if chain.digest != trails.get(name, BEGINNING):
            text = "is the last line of a trail of before, which the journal names otherwise"
            yield Fault("changed" if name in trails else "forked", f"{name}: {chain.where}", text)


def _shipped(location: Location) -> dict[str, dict[int, Head | None]]:
    """Shipped heads by the journal's name and their own number; None where one is spoilt."""
    found: dict[str, dict[int, Head | None]] = defaultdict(dict)
    names = [n for n in sorted(location.entries("heads")) if n.rpartition("/")[2].isdecimal()]
    with ThreadPoolExecutor(READERS) as pool:
        for name, text in zip(names, pool.map(location.read, names), strict=True):
            _, journal, number = name.split("/")
            found[journal][int(number)] = Head.of(text or b"")
    return found


def _shipped_faults(
    trusted: Trusted,
    chain: _Chain,
    name: str,
    heads: dict[int, Head | None],
    accepted: Collection[str],
) -> Iterator[Fault]:
    """What the shipped heads of one journal say against the chain; the first of each kind."""
    if name not in chain.journals:
        if not name.startswith(tuple(f"{known}." for known in chain.journals)):
            text = "is not in this chain: that was rewritten from its first line, or another state "
            yield Fault("forked", f"heads/{name}", f"{text}ships to the same place")
        return
    lacking = sorted({*range(1, max(heads) + 1)} - {*heads})
    if lacking:
        yield Fault("cut", shipped_name(name, lacking[0]), "lacks, and later heads are there")
    starts = [*chain.journals.values()]
    later = [start for start in starts if start > chain.journals[name]]
    ends = later[0] if later else None
    for number, head in sorted(heads.items()):
        where = shipped_name(name, number)
        if head is None or head.journal != name:
            yield Fault("unsigned", where, "is no head of this journal")
            continue
        yield from _signature_fault(trusted, head, where)
        seen = f"{where}, which was shipped at {head.time[:19]}Z and names line {head.number}"
        digest, place = chain.known.get(head.number, ("", chain.where))
        if ends and head.number >= ends:
            if name not in accepted:
                text = f"begins anew after line {ends - 1}; the journal goes on elsewhere: {seen}"
                yield Fault("forked", chain.known[ends][1], text)
            return
        if head.number > chain.number:
            yield Fault("cut", place, f"is the last line, against {seen}")
            return
        if digest != head.digest:
            yield Fault("changed", place, f"or one before it was changed, against {seen}")
            return
