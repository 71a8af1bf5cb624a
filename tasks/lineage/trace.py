"""Reading lineage: from any version of anything back to the raw files, by digests."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.kernel.errors import ArtifactError
from tasks.lineage.journal import Journal

logger = logging.getLogger(__name__)

MIN_DIGEST = 6
_DIGEST = re.compile(rf"[0-9a-f]{{{MIN_DIGEST},64}}")


@dataclass(frozen=True)
class Data:
    """One version of one dataset."""

    namespace: str
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} @ {self.version[:12]}"


@dataclass(frozen=True)
class Origin:
    """How one version came to be: the job that made it, and what that read."""

    data: Data
    note: str = ""
    """What a person calls this version."""
    job: str | None = None
    """None where no event records its making: a raw file, or something older than the files."""
    commit: str | None = None
    inputs: tuple[Data, ...] = ()
    uri: str = ""
    """Where its files are, in the artifact store."""


@dataclass(frozen=True)
class Chain:
    """Everything behind one version.

    Attributes:
        start: the version asked about.
        origins: how each known version came to be, the newest last.
    """

    start: Data
    origins: Mapping[Data, Origin]

    def origin(self, data: Data) -> Origin:
        """How one version of the chain came to be."""
        return self.origins.get(data, Origin(data))

    def __iter__(self) -> Iterator[Origin]:
        """Each version once, nearest first."""
        return map(self.origin, _reached(self.start, lambda data: self.origin(data).inputs))

    def sources(self) -> list[Data]:
        """What it all began with: the raw files."""
        return [origin.data for origin in self if not origin.inputs]

    def downstream(self) -> list[Data]:
        """Everything that was made from the version asked about, nearest first."""
        made: dict[Data, list[Data]] = {}
        for origin in self.origins.values():
            for data in origin.inputs:
                made.setdefault(data, []).append(origin.data)
        return _reached(self.start, lambda data: made.get(data, ()))[1:]


def _reached(start: Data, following: Callable[[Data], Iterable[Data]]) -> list[Data]:
    """One version, and all that is reached from it, each once and nearest first."""
    found, seen = [start], {start}
    for data in found:
        new = [each for each in dict.fromkeys(following(data)) if each not in seen]
        found += new
        seen.update(new)
    return found


def trace(name: str, journal: Journal) -> Chain:
    """The chain behind one dataset.

    Args:
        name: the beginning of a digest (six characters or more), or a dataset's name or its end,
            such as `models/flight-delay/1` or `flight-delay/1/onnx-fp32`; of several versions under
            one name the newest is meant.
        journal: the lineage files.

    Raises:
        ArtifactError: the files hold no such thing, or of several.
    """
    origins = known_origins(journal)
    return Chain(_named(name, [*origins]), origins)


def known_origins(journal: Journal) -> dict[Data, Origin]:
    """How each version in the files came to be, the newest last."""
    origins: dict[Data, Origin] = {}
    for found in _origins(journal):
        known = origins.get(found.data, found)
        note, uri = found.note or known.note, found.uri or known.uri
        if found.job:
            origins.pop(found.data, None)  # the newest last
        else:
            found = known
        origins[found.data] = replace(found, note=note, uri=uri)
    return origins


def address(data: Data) -> str:
    """What the feature repository calls a raw file."""
    return f"{data.namespace}/{data.name}" if "://" in data.namespace else data.name


def format_chain(chain: Chain) -> list[str]:
    """The chain as lines of text: what a thing was made from stands below it, further in.

    Earlier versions of the same dataset are one line.
    """
    lines: list[str] = []
    shown: set[Data] = set()
    stack = [(chain.start, "", "")]
    while stack:
        data, first, rest = stack.pop()
        origin = chain.origin(data)
        again = data in shown and bool(origin.inputs)
        shown.add(data)
        note = f"  ({origin.note})" if origin.note else ""
        made = "  as above" if again else f"  by {origin.job}" if origin.job else ""
        lines.append(f"{first}{data}{note}{made}")
        if again:
            continue
        parts = [part for part in origin.inputs if part.name != data.name]
        if num_earlier := _num_earlier(chain, origin):
            more = f"{rest}{'│  ' if parts else '   '}"
            lines.append(f"{more}after {num_earlier} earlier version(s) of {data.name}")
        for position, part in reversed(list(enumerate(parts))):
            branch, beneath = ("└─ ", "   ") if position == len(parts) - 1 else ("├─ ", "│  ")
            stack.append((part, rest + branch, rest + beneath))
    return lines


def _num_earlier(chain: Chain, origin: Origin) -> int:
    """How many versions of the same dataset came before."""
    seen = {origin.data}
    while before := next((d for d in origin.inputs if d.name == origin.data.name), None):
        if before in seen:
            break
        seen.add(before)
        origin = chain.origin(before)
    return len(seen) - 1


def _origins(journal: Journal) -> Iterator[Origin]:
    """What the events tell of all they name. One of another shape is passed over, and counted."""
    num_strange = 0
    for event in journal.events():
        if event.get("eventType") == "COMPLETE":
            try:
                yield from list(_origins_in(event))
            except (AttributeError, KeyError, TypeError):
                num_strange += 1
    if num_strange:
        logger.warning("%s: %d event(s) were passed over", journal.folder, num_strange)


def _origins_in(event: Mapping[str, Any]) -> Iterator[Origin]:
    job = event["job"]
    commit = job.get("facets", {}).get("sourceCodeLocation", {}).get("version")
    read, made = ([*map(_data, event.get(side, ()))] for side in ("inputs", "outputs"))
    yield from (Origin(data, note, uri=uri) for data, note, uri in read)
    inputs = tuple(dict.fromkeys(data for data, _, _ in read))
    yield from (Origin(data, note, job["name"], commit, inputs, uri) for data, note, uri in made)


def _data(dataset: Mapping[str, Any]) -> tuple[Data, str, str]:
    facets = dataset.get("facets", {})
    version = facets.get("version", {}).get("datasetVersion", "")
    earlier = facets.get("falajNote", {}).get("note", "")  # a facet of events before 2026-11-25
    note = facets.get("documentation", {}).get("description", earlier)
    uri = facets.get("dataSource", {}).get("uri", "")
    return Data(dataset["namespace"], dataset["name"], str(version)), str(note), str(uri)


def _named(name: str, known: Sequence[Data]) -> Data:
    if _DIGEST.fullmatch(name):
        found = [data for data in known if data.version.startswith(name)]
    else:
        ends = [data for data in known if f"/{data.name}".endswith(f"/{name}")]
        found = list({data.name: data for data in ends}.values())
    if len(found) != 1:
        held = ", ".join(map(str, found[:5])) or "nothing"
        raise ArtifactError(
            f"lineage of {name!r}: {len(found)} things are called so ({held}); give the beginning "
            f"of one digest, at least {MIN_DIGEST} characters, or a name such as "
            "models/<name>/<version>"
        )
    return found[0]
