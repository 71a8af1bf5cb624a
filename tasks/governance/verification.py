"""Whether a journal is whole: its lines, its signed head, trails of before, and shipped heads.

The chain shows what was changed by somebody who did not, or could not, make all later lines anew.
Shipped heads show the rest: the owner of the state and of its key cannot take them back.
"""

from base64 import b64decode
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from tasks.governance import journal as written
from tasks.governance.journal import BEGIN, BEGINNING, Head, Journal, JournalLine, shipped_name
from tasks.kernel.errors import SignatureError
from tasks.kernel.files import digest_of
from tasks.kernel.keys.store import JOURNAL, Signature, check_signature
from tasks.kernel.location import Location
from tasks.kernel.settings import bring

Kind = Literal["changed", "cut", "forked", "unsigned"]


@dataclass(frozen=True)
class Fault:
    """What is wrong, and where."""

    kind: Kind
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


def verify(journal: Journal, accepted: Collection[str] = ()) -> JournalResult:
    """Follow a journal from its first line to its head, and compare it with what was shipped.

    Other processes' acts wait meanwhile.

    Args:
        journal: of a state.
        accepted: names of journals that are known to go on elsewhere.

    Raises:
        TransientError, StorageError: the location of shipped heads does not answer, or refuses.
    """
    location, chain = written.shipping_location(), _Chain(journal.keys.public_keys(JOURNAL))
    # First, as what is shipped meanwhile is of lines that were not read.
    shipped = _shipped(location) if location else {}
    with journal.reading():
        for line in journal.lines():
            chain.add(line)
        faults = [*chain.faults, *chain.against_head(written.read_head(journal.folder))]
    for name, digest in chain.trails.items():
        file = bring(journal.folder.parent / name)
        if not file.is_file() or digest_of(file) != digest:
            faults.append(Fault("changed", name, "is a trail of before, not as it was taken over"))
    for name, heads in shipped.items():
        faults += chain.against_shipped(name, heads, is_accepted=name in accepted)
    covered = [h.number for n in shipped.keys() & chain.journals for h in shipped[n].values() if h]
    return JournalResult(
        chain.journal,
        len(chain.known) - 1,
        chain.known[chain.number][0],
        tuple(faults),
        sum(map(len, shipped.values())) if location else None,
        max(0, chain.number - max(covered, default=0)),
    )


class _Chain:
    """Lines that were followed, and what is wrong with them."""

    def __init__(self, trusted: Mapping[str, bytes]) -> None:
        self.trusted, self.number, self.faults = trusted, 0, list[Fault]()
        # Digest and place by number; names that the journal had, and where each begins.
        self.known = {0: (BEGINNING, "its beginning")}
        self.journals, self.trails = {"": 0}, dict[str, str]()

    @property
    def journal(self) -> str:
        """The name it has now."""
        return next(reversed(self.journals))

    def add(self, line: JournalLine) -> None:
        content, where = line.content, f"{line.file} line {line.position}"
        number: Any = content.get("number")
        if not isinstance(number, int):
            self.faults.append(Fault("changed", where, "is cut off or is no line of a journal"))
            return
        digest, before = self.known[self.number]
        if (content.get("previous"), number) != (digest, self.number + 1):
            text = f"is number {number} and does not name {before}, number {self.number}, as it is"
            later: Kind = "cut" if number > self.number + 1 else "changed"
            self.faults.append(Fault("forked" if number <= self.number else later, where, text))
        self.number, self.known[number] = number, (line.digest, where)
        if content.get("action") == BEGIN:
            self.journals[written.name_of(self.journal, line.digest)] = number
            self.trails |= content.get("trails") or {}

    def against_head(self, head: Head | None) -> Iterator[Fault]:
        if head is not None:
            yield from self._against(head, "head.json")
            if head.number < self.number - 1:
                where, text = self.known[self.number][1], f"is behind line {head.number}, the one"
                yield Fault("unsigned", where, f"{text} that was signed")
        elif self.number > 1:
            yield Fault("unsigned", "head.json", "is missing or spoilt, and vouches for no line")

    def against_shipped(
        self, name: str, heads: dict[int, Head | None], *, is_accepted: bool
    ) -> Iterator[Fault]:
        """What the shipped heads of one journal say, up to the first that differs."""
        if name not in self.journals:
            if name.partition(".")[0] not in self.journals:  # else it is that of a copy
                text = "is not in this chain: it was rewritten from its first line, or another"
                yield Fault("forked", f"heads/{name}", f"{text} state ships to the same place")
            return
        if lacking := {*range(min(heads), max(heads))} - {*heads}:
            yield Fault("cut", shipped_name(name, min(lacking)), "lacks, and later ones are there")
        ends = [number for number in self.journals.values() if number > self.journals[name]]
        for number, head in sorted(heads.items()):
            where = shipped_name(name, number)
            if head is None or head.journal != name:
                yield Fault("unsigned", where, "is no head of this journal")
            elif ends and head.number >= ends[0]:
                text = f"begins anew; by {where} of {head.time[:19]}Z {name} goes on elsewhere"
                yield from [Fault("forked", self.known[ends[0]][1], text)] * (not is_accepted)
                return
            else:
                found = [*self._against(head, where)]
                yield from found
                if any(fault.where != where for fault in found):
                    return

    def _against(self, head: Head, name: str) -> Iterator[Fault]:
        try:
            signature = Signature(head.key_id, b64decode(head.signature))
            check_signature(self.trusted, head.signed, signature, name)
        except (SignatureError, ValueError) as exc:
            yield Fault("unsigned", name, str(exc))
        digest, where = self.known.get(head.number, ("", self.known[self.number][1]))
        if digest != head.digest:
            text = f"or a line before it is not what {name} of {head.time[:19]}Z vouches for"
            kind: Kind = "cut" if head.number > self.number else "changed"
            yield Fault(kind, where, f"{text} as line {head.number}")


def _shipped(location: Location) -> dict[str, dict[int, Head | None]]:
    """Shipped heads by the journal's name and their own number; None where one is spoilt."""
    found: dict[str, dict[int, Head | None]] = defaultdict(dict)
    names = [name for name in location.entries("heads") if name.rpartition("/")[2].isdecimal()]
    with ThreadPoolExecutor(16) as pool:
        for name, text in zip(names, pool.map(location.read, names), strict=True):
            _, journal, number = name.rsplit("/", 2)
            found[journal][int(number)] = Head.of(text or b"")
    return found
