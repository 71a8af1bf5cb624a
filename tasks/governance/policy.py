"""May this go there? Asked of the laws, written in Rego, before anything is placed.

Of data without a home nobody is asked, and the engine is not loaded. Of all other data every doubt
is a refusal: an address without a zone, a policy that cannot be read, an engine that is not there,
a home of which no policy speaks. No legal advice: each policy says which articles it has.

The files are in `policies/` of the project, else of the state folder, or in the folder that
`FALAJ_POLICIES` names: `policy.yaml` (zones, bases, waivers), further policies, and those that take
the place of a shipped one by its name.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from tasks.governance.handling import DataClass, Declared, Handling, Placement, Zone, variables
from tasks.governance.journal import Journal
from tasks.governance.places import ends_of, fits, zone_of
from tasks.kernel.errors import ConfigurationError, PlacementRefusedError
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import USE_CASE_FILE, VALUE, Settings
from tasks.kernel.values import Contract, Frozen, checked

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("policies")
POLICY_FILE, ADEQUACY_FILE = "policy.yaml", "adequacy.yaml"
FOLDER_VARIABLE, ZONE_VARIABLE = "FALAJ_POLICIES", "FALAJ_ZONE"
CLASS_VARIABLE = "FALAJ_HARDWARE_CLASS"
LANDED, STATE, WORK = "landed", "state", "work"
NOTHING = "Nothing was placed"


class Basis(Contract):
    """A safeguard, consent or decision that somebody has on file, for data of a home in a zone."""

    home: Zone
    zone: Zone
    basis: str = Field(pattern=r"^[a-z][a-z-]*$", description="As the law's policy names it.")
    document: str = Field(min_length=1, description="Where it is on file.")
    until: date = Field(description="Last day on which it holds.")


class Waiver(Contract):
    """Lets through what one rule refuses, until a day; two people decide it."""

    rule: str
    what: str
    where: str = Field(min_length=1, description="Pattern of the address, as in `zones`.")
    reason: str = Field(min_length=1)
    until: date = Field(description="Last day on which it holds.")
    approved_by: tuple[str, ...]

    def fault(self, today: date) -> str | None:
        """Why it does not count; None where it does."""
        people = {name.strip().casefold() for name in self.approved_by} - {""}
        if self.until < today:
            return f"it ended on {self.until}"
        return None if len(people) > 1 else "it needs two different people in approved_by"


class PolicyFile(Contract):
    """What the owner of an installation says about places."""

    own: Zone | None = Field(default=None, description="Zone of this machine and its state folder.")
    zones: dict[str, Zone] = Field(default={}, description="Pattern of an address to its zone.")
    bases: tuple[Basis, ...] = ()
    waivers: tuple[Waiver, ...] = ()


class Reason(Frozen):
    """What one rule of one policy says about the data of one home."""

    home: str
    allow: bool
    rule: str
    law: str
    article: str
    as_of: date
    says: str
    at: str = Field(default="", description="File and line of the rule.")

    def __str__(self) -> str:
        verb = "allows" if self.allow else "refuses"
        source = f"{self.law}, {self.article} (as of {self.as_of}; {self.rule}, {self.at})"
        return f"{source} {verb} it for {self.home}: {self.says}"


@dataclass(frozen=True)
class Decision:
    """Whether something may be placed, and why.

    Attributes:
        what: goes there.
        where: the address, without what may be secret.
        setting: that names it.
        zone: of the address; several where it names several hosts.
        handling: of the data.
        allowed: it may.
        reasons: what the rules say, refusals first.
        notes: which waiver counted or did not, and why.
    """

    what: str
    where: str
    setting: str
    zone: str
    handling: Handling
    allowed: bool
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        seen = f"{self.what} ({self.handling.data_class}, of {', '.join(self.handling.homes)})"
        named = f" by {self.setting}" if self.setting else ""
        noted = [str(reason) for reason in self.reasons if reason.allow == self.allowed]
        return f"{seen} to {self.where} in zone {self.zone}{named}: " + "; ".join(
            [*noted, *self.notes]
        )


class Engine:
    """The policies, compiled; every failure of theirs is a refusal.

    Args:
        files: name to where the file is and its text; Rego, and the lists of adequate zones.
    """

    def __init__(self, files: Mapping[str, tuple[str, str]], adequacy: Mapping[str, Any]) -> None:
        self._files = files
        try:
            from regopy import Interpreter, RegoError

            self._error: type[Exception] = RegoError
            self._rego = Interpreter()
            self._rego.add_data_json(json.dumps({"adequacy": adequacy}, default=str))
            for name, (_, text) in files.items():
                self._rego.add_module(name, text)
            self._bundle = self._rego.build("found = data.falaj")
        except ImportError as exc:
            raise _closed(f"the policy engine cannot be loaded ({exc})") from exc
        except Exception as exc:  # of the library: its own kinds, and UnicodeError, ValueError
            raise _closed(f"the policies do not compile: {' '.join(str(exc).split())}") from exc

    def ask(self, question: Mapping[str, Any]) -> list[Reason]:
        """What all rules say about one placement."""
        try:
            self._rego.set_input(question)
            answer = json.loads(str(self._rego.query_bundle(self._bundle)))
            packages = answer["bindings"]["found"]
            found = [each for package in packages.values() for each in package.get("answer", [])]
            reasons = TypeAdapter(list[Reason]).validate_python(found)
        except self._error as exc:
            raise _closed(f"a policy failed: {' '.join(str(exc).split())}") from exc
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise _closed("the policies gave no answer that can be read") from exc
        return [reason.model_copy(update={"at": self._line(reason.rule)}) for reason in reasons]

    def _line(self, rule: str) -> str:
        for path, text in self._files.values():
            for number, line in enumerate(text.splitlines(), start=1):
                if f'"rule": "{rule}"' in line:
                    return f"{path}:{number}"
        return "a rule that no line names"


def _closed(why: str) -> PlacementRefusedError:
    return PlacementRefusedError(
        f"{why}; expected an answer for data that has a home. Correct the policies (`falaj policy "
        f"check` reads them), or install what is missing. {NOTHING}"
    )


@lru_cache(maxsize=4)
def _engine(files: tuple[tuple[str, str, str], ...], adequacy: str) -> Engine:
    return Engine({name: (path, text) for name, path, text in files}, json.loads(adequacy))


class Policies:
    """The policies of an installation.

    Args:
        home: the state folder.
        project: folder of the use case.
        today: on which bases and waivers count; by default this day in UTC.
        environment: `FALAJ_POLICIES` and `FALAJ_ZONE` (instead of `own`, for this machine).

    Raises:
        ConfigurationError: `policy.yaml` is wrong, or the named folder does not exist.
    """

    def __init__(
        self,
        home: Path,
        project: Path,
        today: date | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.folders = (home, project)
        self.today = today or datetime.now(UTC).date()
        named = environment.get(FOLDER_VARIABLE)
        own = [Path(named)] if named else [project / "policies", home / "policies"]
        self.folder = next((folder for folder in own if folder.is_dir()), None)
        if named and self.folder is None:
            raise ConfigurationError(
                f"{FOLDER_VARIABLE} names {named}, which is no folder. {NOTHING}"
            )
        self.file = PolicyFile()
        if self.folder is not None and (file := self.folder / POLICY_FILE).exists():
            self.file = checked(PolicyFile, read_yaml(file, str(file)), str(file), NOTHING)
        self.own = environment.get(ZONE_VARIABLE) or self.file.own

    @property
    def engine(self) -> Engine:
        """The engine, compiled once for the same texts.

        Raises:
            PlacementRefusedError: it cannot be loaded, or a policy cannot be read.
        """
        folders = [SHIPPED, *([self.folder] if self.folder else [])]
        found = {file.name: file for folder in folders for file in sorted(folder.glob("*.rego"))}
        lists = [file for folder in folders if (file := folder / ADEQUACY_FILE).exists()]
        try:
            texts = tuple((n, _short(file), file.read_text("utf-8")) for n, file in found.items())
            adequacy = read_yaml(lists[-1], str(lists[-1]))
        except (OSError, ValueError, ConfigurationError) as exc:
            raise _closed(f"a policy cannot be read ({exc})") from exc
        return _engine(texts, json.dumps(adequacy, default=str))

    def decide(self, placement: Placement, handling: Handling) -> Decision:
        """Whether data may be there, and why.

        Raises:
            PlacementRefusedError: the policies cannot answer.
        """
        ends = ends_of(placement.where)
        zones = {end: zone_of(end, self.file.zones, self.own, self.folders) for end in ends}
        where, zone = ", ".join(map(str, ends)), ", ".join(sorted({*zones.values()}))
        base = (placement.what, where, placement.setting, zone, handling)
        if not handling.homes:
            return Decision(*base, allowed=True)
        reasons: list[Reason] = []
        notes: list[str] = []
        allowed = True
        for end, each in zones.items():
            found = self.engine.ask(self._question(placement.what, each, handling))
            refusals = [reason for reason in found if not reason.allow]
            for home in {*handling.homes} - {reason.home for reason in found}:
                reason = _unspoken(home, each, handling.data_class)
                refusals.append(reason)
                found.append(reason)
            counted = {r.rule: self._waived(r.rule, placement.what, end, notes) for r in refusals}
            allowed = allowed and all(counted.values())
            reasons += found
        reasons.sort(key=lambda reason: (reason.allow, reason.home, reason.rule))
        return Decision(*base, allowed, tuple(dict.fromkeys(reasons)), tuple(dict.fromkeys(notes)))

    def _question(self, what: str, zone: str, handling: Handling) -> dict[str, Any]:
        bases = [
            basis.model_dump(include={"home", "zone", "basis"})
            for basis in self.file.bases
            if basis.until >= self.today
        ]
        return {
            "what": what,
            "class": handling.data_class,
            "homes": list(handling.homes),
            "zone": zone,
            "purpose": handling.purpose,
            "purposes": list(handling.purposes),
            "bases": bases,
        }

    def _waived(self, rule: str, what: str, end: Any, notes: list[str]) -> bool:
        for waiver in self.file.waivers:
            if (waiver.rule, waiver.what) == (rule, what) and fits(waiver.where, end):
                fault = waiver.fault(self.today)
                people = " and ".join(waiver.approved_by)
                kept = f"waived until {waiver.until} by {people}: {waiver.reason}"
                notes.append(f"{rule}: " + (f"a waiver does not count: {fault}" if fault else kept))
                if fault is None:
                    return True
        return False


def _short(file: Path) -> str:
    return f"{'policies' if file.parent == SHIPPED else file.parent.name}/{file.name}"


def _unspoken(home: str, zone: str, data_class: DataClass) -> Reason:
    says = f"no policy speaks of {data_class} data of {home} in {zone}, so it stays at home"
    fields = {"rule": "own-silence", "law": "Own rules of residency", "article": "rule 5"}
    at = f"{Path(__file__).name}:_unspoken"
    return Reason(
        home=home, allow=False, as_of=datetime.now(UTC).date(), says=says, at=at, **fields
    )


class _Table(Declared):
    model_config = ConfigDict(extra="ignore")


def known_handlings(settings: Settings) -> tuple[Handling, ...]:
    """How data of this installation is to be treated: of the project, and of all landed rows.

    Raises:
        ConfigurationError: the project's declaration cannot be read.
    """
    found = []
    with suppress(FileNotFoundError):
        features = read_yaml(settings.feature_repo / USE_CASE_FILE, USE_CASE_FILE).get("features")
        given = features if isinstance(features, dict) else {}
        try:
            tables = TypeAdapter(list[_Table]).validate_python(given.get("raw_tables") or [])
        except ValidationError as exc:
            raise ConfigurationError(
                f"{USE_CASE_FILE} declares data_class, home or purposes of a raw table that cannot "
                f"be; `falaj check` says which. {NOTHING}"
            ) from exc
        if tables:
            found.append(Handling.of(tables, str(given.get("purpose") or "")))
    for folder in settings.store.folders(LANDED):
        kept = json.loads((folder / VALUE).read_text("utf-8")).get("handling")
        found += [Handling.model_validate(kept)] if kept else []
    return tuple(dict.fromkeys(each for each in found if each.homes))


def decisions(
    settings: Settings, placements: Iterable[Placement], handlings: Sequence[Handling]
) -> Iterator[Decision]:
    """What the policies say of each placement for each kind of data that has a home."""
    asked = [handling for handling in handlings if handling.homes]
    policies = Policies(settings.home, settings.feature_repo) if asked else None
    for placement in dict.fromkeys(placements) if policies else ():
        for handling in asked:
            yield policies.decide(placement, handling)  # type: ignore[union-attr]


def refused_pool(settings: Settings, pool: str, handling: Handling) -> str | None:
    """Why data may not be worked on by a pool's workers; None where it may.

    Raises:
        PlacementRefusedError: the policies cannot answer.
    """
    asked = [Placement(WORK, f"pool:{pool}")]
    return next((str(d) for d in decisions(settings, asked, [handling]) if not d.allowed), None)


def require_placements(
    settings: Settings,
    placements: Iterable[Placement] = (),
    handlings: Sequence[Handling] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """See that data may be where it is about to go; what the environment names is always asked.

    Refusals, and what only a waiver allows, are recorded in the journal.

    Args:
        settings: of the installation.
        placements: what goes where.
        handlings: of the data; None: of all that the installation has, and its project declares.
        environment: variables.

    Raises:
        PlacementRefusedError: a law or the owner's rules refuse a placement, or nothing can answer.
        ConfigurationError: `policy.yaml` or the declaration is wrong.
    """
    known = known_handlings(settings) if handlings is None else handlings
    if not any(handling.homes for handling in known):
        return
    own = environment.get(CLASS_VARIABLE)
    asked = [*placements, *variables(environment)]
    asked += [Placement(WORK, f"pool:{own}", CLASS_VARIABLE)] if own else []
    noted = [d for d in decisions(settings, asked, known) if d.notes or not d.allowed]
    refused = [found for found in noted if not found.allowed]
    # Where the state may not be, nothing is written, and the journal is a part of the state.
    journal = None if any(d.what == STATE for d in refused) else Journal(settings.home / "audit")
    for found in noted:
        outcome = "waived" if found.allowed else "refused"
        homes = " ".join(found.handling.homes)
        subject = {"what": found.what, "where": found.where, "zone": found.zone, "homes": homes}
        rules = [reason.rule for reason in found.reasons if not reason.allow]
        why = found.notes
        if journal is not None:
            journal.append("placement", outcome=outcome, subject=subject, rules=rules, why=why)
        logger.warning("%s: %s", outcome, found)
    if refused:
        raise PlacementRefusedError(
            "\n".join(map(str, refused)) + f". {NOTHING}; place it elsewhere, name the zone or the "
            f"basis in policies/{POLICY_FILE}, or have two people sign a waiver there"
        )
