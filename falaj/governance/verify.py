"""Where things come from and where they went: `falaj trace` and `falaj verify`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from falaj.context import EXIT_DATA, EXIT_FAILED, Context, Here, Shown, row
from falaj.data import count_line
from falaj.models import find_version
from flows.config import read_pipeline_config
from tasks.contracts.base import Artifact, TimeWindow
from tasks.governance.bill import digests_in
from tasks.kernel import errors
from tasks.kernel.files import digest_of, scratch_folder
from tasks.kernel.settings import URI_SCHEME, Settings, bring
from tasks.lineage.journal import Journal
from tasks.lineage.trace import Chain, Data, Origin, address, format_chain
from tasks.lineage.trace import trace as trace_back
from tasks.registry.model_folder import BILL_FILE, PROGRAM_FILE, read_version
from tasks.release.ledger import ReleaseLedger

if TYPE_CHECKING:
    from tasks.release.records import Release

REQUEST, REPORT = "requests/", "reports/"
"""Beginnings of names that lineage has not: a request that was answered, a report of a run."""
State = Literal["whole", "changed", "gone", "digest only"]
_DIGEST_ONLY: State = "digest only"
_MADE = re.compile(r"(?:models|variants)/([^/]+)/([0-9]+)(?:/.+)?")
NAMES = "models/NAME/1, snapshots/NAME, reports/latest, requests/ID (default: the champion)."
Thing = Annotated[str | None, Parameter(help=f"Beginning of a digest, or a name: {NAMES}")]


@dataclass(frozen=True)
class Checked:
    """One thing, the digest that it must have, and what was found."""

    name: str
    sha256: str
    state: State
    where: str

    def __str__(self) -> str:
        return f"{self.state:<12}{self.sha256[:12]:<14}{self.name}  {self.where}".rstrip()


def trace(
    thing: Thing = None,
    /,
    *,
    downstream: Annotated[bool, Parameter(help="What was made from it, and served.")] = False,
    context: Here,
) -> Shown:
    """Show what something was made from, to the raw files; or what was made from it.

    Raises:
        ArtifactError: nothing, or more than one thing, is called so.
        DataContractError: no such request is logged.

    Examples:
        falaj trace
        falaj trace models/flight-delay/1
        falaj trace snapshots/flight_delay_v1 --downstream
    """
    name, served = _named(thing, context)
    chain = trace_back(name, Journal(context.home / "lineage"))
    if downstream:
        return _downstream(chain, context.settings)
    sources = chain.sources()
    lines = [*format_chain(chain), "", *(row("From", f"{address(d)} {d.version}") for d in sources)]
    facts = {"served": served, "chain": list(chain), "sources": sources}
    return Shown(facts, [*starmap(row, served.items()), *lines])


def verify(thing: Thing = None, /, *, context: Here) -> Shown:
    """Compute the digests anew of all that something was made from, to the raw files.

    The exit code is 4 where something has changed, or a file of the model or a raw file is gone; 1
    where no lineage leads further. What was pruned, or is recorded by its digest alone, is shown.

    Raises:
        ArtifactError, RegistryError: there is no such thing.
        DataContractError: no such request is logged.

    Examples:
        falaj verify
        falaj verify models/flight-delay/3 --json
        falaj verify requests/2f6a
    """
    name, served = _named(thing, context)
    try:
        chain = trace_back(name, Journal(context.home / "lineage"))
    except errors.ArtifactError:
        if not (known := _MADE.fullmatch(name)):
            raise
        found, _ = find_version(known[1], int(known[2]), context)
        name = f"models/{found.name}/{found.number}"
        chain = Chain(Data("", name, found.ref.program_sha256), {})
    things = list(_Verifier(chain, context).things())
    states = Counter(thing.state for thing in things)
    lost = [t for t in things if t.state == "gone" and not t.where.startswith(URI_SCHEME)]
    wrong = [*(t for t in things if t.state == "changed"), *lost]  # the store can be pruned
    sources = [data for data in chain.sources() if data != chain.start]
    code, said = 0, f"is what was made from {len(sources)} raw files"
    if wrong:
        code, said = EXIT_DATA, f"is NOT what was recorded ({', '.join(t.name for t in wrong)})"
    elif not sources:
        code, said = EXIT_FAILED, "is whole, and nothing records what it was made from"
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    lines = [*map(str, things), f"{chain.start} {said}; {len(things)} things: {counted}"]
    facts = {"start": chain.start, "served": served, "things": things, "wrong": wrong}
    return Shown({**facts, "sources": sources}, [*starmap(row, served.items()), *lines], code)


def _named(thing: str | None, context: Context) -> tuple[str, dict[str, Any]]:
    """The name in the lineage of what is meant; of a request also who answered it."""
    if thing is None:
        version, _ = find_version(None, None, context)
        return f"models/{version.name}/{version.number}", {}
    if thing.startswith(REPORT):
        settings, name = context.settings, thing.removeprefix(REPORT)
        folder = settings.latest_report() if name == "latest" else bring(settings.reports / name)
        if not (file := folder / "report.json").is_file():
            raise errors.ConfigurationError(f"{file} does not exist; give {REPORT}latest")
        made = json.loads(file.read_text(encoding="utf-8"))["version"]
        return f"models/{made['name']}/{made['version']}", {}
    if thing.startswith(REQUEST):
        served = _served(thing.removeprefix(REQUEST), context.settings)
        return "variants/{model}/{version}/{variant}".format_map(served), served
    return thing, {}


def _served(request_id: str, settings: Settings) -> dict[str, Any]:
    """What the prediction log says of a request, and the releases that split its model's then.

    Raises:
        DataContractError: it says nothing, or that nobody answered.
    """
    import pyarrow.compute as pc

    from tasks.predictions import schema as log
    from tasks.predictions.reading import LogQuery, read_rows

    columns = [log.MODEL, log.VERSION, log.VARIANT, log.TRACK, log.HARDWARE, log.EVENT_TIME]
    for model in log.logged_models(settings.home):
        for table in read_rows(settings.home, LogQuery(model), [log.REQUEST_ID, *columns]):
            for found in table.filter(pc.field(log.REQUEST_ID) == request_id).to_pylist():
                at = found[log.EVENT_TIME]
                releases = [
                    f"{release.title}, {period.shares.candidate:g} % candidate"
                    for release in _releases(model, settings)
                    for period in release.periods
                    if period.since <= at and (period.until is None or at < period.until)
                ]
                track, endpoint = found.pop(log.TRACK), f"/v2/models/{model}/infer"
                return {**found, "track": track, "endpoint": endpoint, "releases": releases}
    raise errors.DataContractError(
        f"no answered request {request_id!r} is in the prediction log; expected the id that an "
        "answer bore, not erased, not too old. Nothing was read further"
    )


def _releases(model: str, settings: Settings) -> list[Release]:
    """All releases of a model; where there is no database of them none is made."""
    is_there = settings.database_url or settings.metadata_file.exists()
    return ReleaseLedger(settings.metadata_url).of_model(model) if is_there else []


def _downstream(chain: Chain, settings: Settings) -> Shown:
    """What was made from a thing; the releases of its models, and the rows that they answered."""
    from tasks.predictions.reading import ReadTally, count_by_version

    made, tally = chain.downstream(), ReadTally()
    matches = (_MADE.fullmatch(data.name) for data in (chain.start, *made))
    models = {(found[1], found[2]) for found in matches if found}
    releases, served = [], []
    for name in sorted({name for name, _ in models}):
        ours = {number for model, number in models if model == name}
        releases += [r for r in _releases(name, settings) if ours & {r.stable, r.candidate}]
        counts = count_by_version(settings.home, name, None, tally)
        served += [count for count in counts if count.version in ours]
    rows = sum(count.answered for count in served)
    lines = [
        *(row("Made", data) for data in made),
        *(row("Release", f"{r.title}: {r.state}, begun {r.opened_at:%F %R}Z") for r in releases),
        *(row("Served", count_line(count)) for count in served),
        *tally.damaged,
        f"{chain.start}: {len(made)} things, {len(models)} model versions, {rows:,} rows answered",
    ]
    facts = {"start": chain.start, "made": made, "releases": releases, "served": served}
    return Shown({**facts, "damaged": tally.damaged}, lines)


class _Verifier:
    """Computes digests anew along a chain."""

    def __init__(self, chain: Chain, context: Context) -> None:
        self.chain, self.context = chain, context

    def things(self) -> Iterator[Checked]:
        """Each thing of the chain, nearest first; of a model all its files and its bill."""
        for origin in self.chain:
            data = origin.data
            if found := _MADE.fullmatch(data.name):
                yield from self._registered(origin, found[1], int(found[2]))
            elif origin.uri:
                yield self._stored(origin)
            elif origin.job or not (data.namespace == "file" or "://" in data.namespace):
                yield Checked(data.name, data.version, _DIGEST_ONLY, origin.note)
            else:
                yield self._raw(data)

    def _registered(self, origin: Origin, name: str, number: int) -> Iterator[Checked]:
        """A variant, which if it was dropped is in the store alone; or a version, with its bill."""
        data = origin.data
        try:
            version, _ = find_version(name, number, self.context)
        except errors.RegistryError:  # deleted, or of another registry
            yield Checked(data.name, data.version, "gone", "registry")
            return
        record, folder = read_version(version), version.folder
        if data.name.startswith("variants/"):
            kept = next((n for n, sha in record.files.items() if sha == data.version), "")
            whole, path = (data.name, data.version), folder / kept
            yield _compared(*whole, path) if kept else self._stored(origin)
            return
        files = {**record.files, PROGRAM_FILE: data.version}
        found = [_compared(f"{data.name}/{n}", sha, folder / n) for n, sha in files.items()]
        if {each.state for each in found} == {"whole"}:  # then no signature fits
            found += [Checked(data.name, data.version, "changed", text) for text in record.damage]
        yield from found
        snapshot, learnt_from = record.ref.snapshot_sha256, {each.version for each in origin.inputs}
        if record.manifest and learnt_from and snapshot not in learnt_from:
            yield Checked(data.name, snapshot, "changed", "the lineage names another snapshot")
        if BILL_FILE in files and not record.damage and learnt_from:
            yield from self._unlike(folder / BILL_FILE)

    def _unlike(self, bill: Path) -> Iterator[Checked]:
        """Data of the bill, whose digest is kept apart, that the lineage does not know."""
        known = {data.version for data in self.chain.origins}
        for sha256, name in digests_in(bill, "data").items():
            if sha256 not in known:
                yield Checked(name, sha256, "changed", "not in the lineage")

    def _stored(self, origin: Origin) -> Checked:
        name, sha256, uri = origin.data.name, origin.data.version, origin.uri
        artifact = Artifact(uri=uri, sha256=sha256, num_bytes=0)
        with suppress(errors.ArtifactError):
            path = self.context.settings.store.path(artifact, verify=False)
            return replace(_compared(name, sha256, path), where=uri)
        return Checked(name, sha256, "gone", uri)

    def _raw(self, data: Data) -> Checked:
        """A raw file, where the use case reads it now; of a database no earlier state is known."""
        uri, state = address(data), _DIGEST_ONLY
        known = {each.version for each in self.chain.origins if address(each) == uri}
        try:
            if not uri.startswith("postgres"):
                seen = self._digest_of_source(data, uri)
                # One that was read again since, with other content, is not a changed one.
                state = "whole" if seen == data.version else state if seen in known else "changed"
        except errors.ConfigurationError:
            state = "gone"
        except errors.TransientError as exc:
            uri = f"{uri} ({exc})"
        return Checked(data.name, data.version, state, uri)

    def _digest_of_source(self, data: Data, uri: str) -> str:
        from tasks.features.tables.raw_files import undeclared
        from tasks.features.tables.sources import open_source

        landed = next(o for o in self.chain.origins.values() if data in o.inputs)
        name, repo = str(landed.job).removeprefix("land."), self.context.settings.feature_repo
        tables = {t.name: t for t in read_pipeline_config(repo).features.raw_tables}
        table = tables.get(name, undeclared(name, uri)).model_copy(update={"uri": uri})
        start, end = map(datetime.fromisoformat, landed.note.split(" to "))
        with scratch_folder("falaj-verify") as scratch:
            return open_source(table, repo, TimeWindow(start=start, end=end), scratch).seen.sha256


def _compared(name: str, sha256: str, path: Path) -> Checked:
    if not path.exists():
        return Checked(name, sha256, "gone", str(path))
    return Checked(name, sha256, "whole" if digest_of(path) == sha256 else "changed", str(path))
