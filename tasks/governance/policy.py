"""May this go there? Asked of the laws, written in Rego, before anything is placed.

Of data without a home nobody is asked, and the engine is not loaded. Of all other data every doubt
is a refusal: an address without a zone, a policy that cannot be read, an engine that is not there,
a home of which no policy speaks. No legal advice: each policy says which articles it has.

The files are in `policies/` of the project, else of the state folder: `policy.yaml` (zones, bases,
waivers), further policies, and those that take the place of a shipped one by its name.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

from pydantic import ConfigDict, Field, TypeAdapter

from tasks.governance.duties import who_agreed
from tasks.governance.handling import Declared, Handling, Placement, Zone, variables
from tasks.governance.identity import read_sign_in
from tasks.governance.journal import Journal
from tasks.governance.rego import Rego
from tasks.governance.zones import End, clear_end, ends_of, fits, zone_of
from tasks.kernel.errors import ConfigurationError, PlacementRefusedError
from tasks.kernel.files import read_yaml
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.kernel.settings import USE_CASE_FILE, VALUE, Settings
from tasks.kernel.values import Contract, Frozen, checked

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("policies")
POLICY_FILE, ADEQUACY_FILE = "policy.yaml", "adequacy.yaml"
LANDED, STATE, WORK = "landed", "state", "work"
NOTHING = "Nothing was placed"


class Basis(Contract):
    """A safeguard, consent or decision that is on file, for data of a home in a zone."""

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
    approved_by: tuple[str, ...] = Field(default=(), description="Where nobody signs in.")

    def fault(self, today: date) -> str | None:
        """Why it does not count; None where it does."""
        people = {_person(name) for name in self.approved_by} - {""}
        if self.until < today:
            return f"it ended on {self.until}"
        both = (
            "it needs two different people: in approved_by, or where people sign in, who both give"
        )
        return None if len(people) > 1 else f"{both} `falaj policy waive {self.rule}`"

    @property
    def about(self) -> dict[str, str]:
        """What people agree to."""
        return self.model_dump(mode="json", exclude={"approved_by"})


def _person(name: str) -> str:
    """The same for each way of writing one name: width, accents, blanks, what cannot be seen."""
    seen = (c for c in normalize("NFKC", name) if category(c) != "Cf")
    return " ".join("".join(seen).casefold().split())


class PolicyFile(Contract):
    """What the owner of an installation says about places."""

    own: Zone | None = Field(default=None, description="Zone of this machine and its state folder.")
    zones: dict[str, Zone] = Field(default={}, description="Pattern of an address to its zone.")
    bases: tuple[Basis, ...] = ()
    waivers: tuple[Waiver, ...] = ()


class Reason(Frozen):
    """What one rule of one policy says about the data of one home; `at`: file and line of it."""

    home: str
    allow: bool
    rule: str
    law: str
    article: str
    as_of: date
    says: str
    at: str = ""

    def __str__(self) -> str:
        source = f"{self.law}, {self.article} (as of {self.as_of}; {self.rule}, {self.at})"
        return f"{source} {'allows' if self.allow else 'refuses'} it for {self.home}: {self.says}"


@dataclass(frozen=True)
class Decision:
    """Whether something may be placed, and why.

    Attributes:
        placement: what goes where, the address without what may be secret.
        zone: of the address; several where it names several hosts.
        handling: of the data.
        allowed: it may.
        reasons: what the rules say, refusals first.
        notes: which waiver counted or did not, and why.
    """

    placement: Placement
    zone: str
    handling: Handling
    allowed: bool
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        to, data = self.placement, self.handling
        by = f" by {to.setting}" if to.setting else ""
        seen = f"{to.what} ({data.data_class}, of {', '.join(data.homes)}) to {to.where}{by}"
        decisive = [str(reason) for reason in self.reasons if reason.allow == self.allowed]
        return f"{seen}, zone {self.zone}: {'; '.join([*decisive, *self.notes])}"


class Engine:
    """The policies, compiled; every failure of theirs is a refusal.

    The library keeps some 20 kB of each query for ever, so the answers themselves are kept too.

    Args:
        files: name, place and text of each policy.
        adequacy: what they read as `data.adequacy`, as JSON.
    """

    def __init__(self, files: Sequence[tuple[str, str, str]], adequacy: str) -> None:
        self._lines: dict[str, str] = {}
        self._packages: dict[str, str] = {}
        self.ask = lru_cache(maxsize=1000)(self._ask)
        for _, place, text in files:
            found = re.findall(r"^package falaj\.(\w+)$", text, re.MULTILINE) or [""]
            self._packages |= dict.fromkeys(found, place)
            for number, line in enumerate(text.splitlines(), start=1):
                for rule in re.findall(r'"rule": "([^"]+)"', line):
                    self._lines.setdefault(rule, f"{place}:{number}")
        modules = [(name, text) for name, _, text in files]
        self._asked_of = partial(Rego, modules, data=f'{{"adequacy": {adequacy}}}')
        try:
            self._rego = self._asked_of([*self._packages])
        except (OSError, ValueError) as exc:
            raise _closed("the policies cannot be loaded", exc) from exc

    def _ask(self, question: str) -> tuple[Reason, ...]:
        """What all rules say about one placement, as JSON."""
        try:
            found = [each for answer in self._rego.ask(json.loads(question)) for each in answer]
            reasons = TypeAdapter(list[Reason]).validate_python(found)
        except TimeoutError as exc:
            _engine.cache_clear()
            raise _closed(f"{self._slow(json.loads(question))} comes to no end", exc) from exc
        except (OSError, TypeError, ValueError) as exc:
            raise _closed("the policies gave no answer", exc) from exc
        lines = self._lines
        return tuple(r.model_copy(update={"at": lines.get(r.rule, "?")}) for r in reasons)

    def _slow(self, question: object) -> str:
        """The first policy that by itself gives no answer either."""
        for package, place in self._packages.items():
            try:
                self._asked_of([package]).ask(question)
            except (OSError, ValueError):
                return place
        return "all policies together"


def _closed(what: str, exc: Exception) -> PlacementRefusedError:
    return PlacementRefusedError(
        f"{what}: {type(exc).__name__}: {' '.join(str(exc).split())}. Without an answer data that "
        f"has a home goes nowhere; mend the policies, or install regopy. {NOTHING}"
    )


_engine = lru_cache(maxsize=4)(Engine)


class Policies:
    """The policies of an installation.

    Args:
        settings: state folder and project.
        today: on which bases and waivers count; by default this day in UTC.
            `FALAJ_ZONE` is the zone of this machine, instead of `own`.

    Raises:
        ConfigurationError: `policy.yaml` is wrong.
    """

    def __init__(self, settings: Settings, today: date | None = None) -> None:
        self.inside = (settings.home, settings.feature_repo)
        self.today = today or datetime.now(UTC).date()
        own = (settings.feature_repo / "policies", settings.home / "policies")
        self.folders = [folder for folder in own if folder.is_dir()][:1]
        file = self.folders[0] / POLICY_FILE if self.folders else SHIPPED / POLICY_FILE
        content = read_yaml(file, str(file)) if file.exists() else {}
        self.file = checked(PolicyFile, content, str(file), NOTHING)
        self.own = os.environ.get("FALAJ_ZONE") or self.file.own

    @cached_property
    def engine(self) -> Engine:
        """The engine, compiled once for the same texts.

        Raises:
            PlacementRefusedError: it cannot be loaded, or a policy cannot be read.
        """
        folders = [SHIPPED, *self.folders]
        found = {file.name: file for folder in folders for file in sorted(folder.glob("*.rego"))}
        adequacy = [f / ADEQUACY_FILE for f in folders if (f / ADEQUACY_FILE).exists()][-1]
        try:
            texts = [(n, f"{f.parent.name}/{n}", f.read_text("utf-8")) for n, f in found.items()]
            lists = json.dumps(read_yaml(adequacy, str(adequacy)), default=str)
        except (OSError, ValueError, ConfigurationError) as exc:
            raise _closed("a policy cannot be read", exc) from exc
        return _engine(tuple(texts), lists)

    def decide(self, placement: Placement, handling: Handling) -> Decision:
        """Whether data may be there, and why; of data without a home it is not asked.

        Raises:
            PlacementRefusedError: the policies cannot answer.
        """
        ends = ends_of(placement.where)
        zones = {end: zone_of(end, self.file.zones, self.own, self.inside) for end in ends}
        reasons: list[Reason] = []
        notes: list[str] = []
        allowed = True
        for end, zone in zones.items() if handling.homes else ():
            found = list(self.engine.ask(self._question(placement.what, zone, handling)))
            silent = {*handling.homes} - {reason.home for reason in found}
            found += [_silence(home, zone, self.today) for home in sorted(silent)]
            for rule in {reason.rule for reason in found if not reason.allow}:
                allowed = self._waived(rule, placement.what, end, notes) and allowed
            reasons += found
        reasons.sort(key=lambda reason: (reason.allow, reason.home, reason.rule))
        shown = replace(placement, where=", ".join(map(str, ends)))
        zone = ", ".join(sorted({*zones.values()}))
        return Decision(shown, zone, handling, allowed, tuple(reasons), tuple(sorted(notes)))

    def _question(self, what: str, zone: str, handling: Handling) -> str:
        names, bases = {"home", "zone", "basis"}, self.file.bases
        valid = [basis.model_dump(include=names) for basis in bases if basis.until >= self.today]
        data = {**handling.model_dump(mode="json"), "class": handling.data_class}
        return json.dumps({**data, "what": what, "zone": zone, "bases": valid})

    def signed(self, waiver: Waiver) -> Waiver:
        """A waiver with those who signed in to agree to it, where two have to; else as written."""
        home = self.inside[0]
        config = read_sign_in(home)
        if config is None or "waiver" not in config.two_approvers:
            return waiver
        people = who_agreed(home, "waiver", waiver.about)
        return waiver.model_copy(update={"approved_by": people})

    def _waived(self, rule: str, what: str, end: End, notes: list[str]) -> bool:
        counts = False
        for waiver in self.file.waivers:
            if (waiver.rule, waiver.what) == (rule, what) and fits(waiver.where, end):
                waiver = self.signed(waiver)
                fault, people = waiver.fault(self.today), " and ".join(waiver.approved_by)
                good = f"is waived until {waiver.until} by {people}: {waiver.reason}"
                notes.append(f"{rule} " + (f"stays, a waiver is void: {fault}" if fault else good))
                counts = counts or not fault
        return counts


def _silence(home: str, zone: str, today: date) -> Reason:
    says = f"no policy has a word on such data in {zone}, so it stays at home"
    named = {"rule": "own-silence", "law": "Own rules of residency", "article": "rule 5"}
    return Reason(home=home, allow=False, as_of=today, says=says, at=Path(__file__).name, **named)


class _Table(Declared):
    model_config = ConfigDict(extra="ignore")


def _declared(config: object) -> list[Handling]:
    """How a use case, as plain data, declares its data; nothing where it has none."""
    features = config.get("features") if isinstance(config, dict) else None
    if not isinstance(features, dict) or not features.get("raw_tables"):
        return []
    try:
        tables = TypeAdapter(list[_Table]).validate_python(features["raw_tables"])
        return [Handling.of(tables, features.get("purpose") or "")]
    except ValueError as exc:
        raise ConfigurationError(
            f"{USE_CASE_FILE} declares data_class, home, purposes or purpose as they cannot be; "
            f"`falaj check` says which. {NOTHING}"
        ) from exc


def known_handlings(settings: Settings) -> tuple[Handling, ...]:
    """How data of this installation is to be treated: of the project, and of all landed rows.

    Raises:
        ConfigurationError: the project's declaration cannot be read.
    """
    file = settings.feature_repo / USE_CASE_FILE
    found = _declared(read_yaml(file, USE_CASE_FILE)) if file.is_file() else []
    for folder in settings.store.folders(LANDED):
        kept = json.loads((folder / VALUE).read_text("utf-8")).get("handling", {})
        found.append(Handling.model_validate(kept))
    return tuple(dict.fromkeys(each for each in found if each.homes))


def decisions(
    settings: Settings, placements: Iterable[Placement], handlings: Sequence[Handling]
) -> Iterator[Decision]:
    """What the policies say of each placement for each kind of data that has a home."""
    asked = [handling for handling in handlings if handling.homes]
    policies = Policies(settings) if asked else None
    for placement in dict.fromkeys(placements) if policies else ():
        yield from (policies.decide(placement, each) for each in asked)  # type: ignore[union-attr]


def refused_pool(settings: Settings, pool: str, parameters: Mapping[str, Any]) -> str | None:
    """Why data of a flow's parameters may not be worked on by a pool; None where it may.

    Raises:
        PlacementRefusedError: the policies cannot answer.
    """
    asked = [Placement(WORK, f"pool:{pool}")]
    found = decisions(settings, asked, _declared(parameters.get("config")))
    return next((str(each) for each in found if not each.allowed), None)


def require_placements(
    settings: Settings,
    placements: Iterable[Placement] = (),
    handlings: Sequence[Handling] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """See that data may be where it is about to go; what the environment names is always asked.

    Refusals, and what only a waiver allows, are recorded in the journal. See `require_tls` too.

    Args:
        settings: of the installation.
        placements: what goes where.
        handlings: of the data; None: of all that the installation has, and its project declares.
        environment: variables.

    Raises:
        PlacementRefusedError: a law or the owner's rules refuse a placement, or nothing can answer.
        ConfigurationError: `policy.yaml` or the declaration is wrong, or an address lacks TLS.
    """
    placed = [*placements, *variables(environment)]
    require_tls(placed, environment)
    known = known_handlings(settings) if handlings is None else handlings
    found = decisions(settings, placed, known)
    notable = [each for each in found if each.notes or not each.allowed]
    refused = [each for each in notable if not each.allowed]
    # Where the state may not be, nothing is written, and the journal is a part of the state.
    writes = not any(each.placement.what == STATE for each in refused)
    for each in notable:
        logger.warning("%s %s", "waived:" if each.allowed else "refused:", each)
        if writes:
            facts = {"zone": each.zone, "homes": each.handling.homes, "notes": each.notes}
            rules = [reason.rule for reason in each.reasons if not reason.allow]
            outcome, subject = "waived" if each.allowed else "refused", vars(each.placement)
            journal = Journal(settings.home / "audit")
            journal.append("place", outcome=outcome, subject=subject, rules=rules, **facts)
    if refused:
        raise PlacementRefusedError(
            "\n".join(map(str, refused)) + f". {NOTHING}; place it elsewhere, name the zone or the "
            f"basis in policies/{POLICY_FILE}, or have two people sign a waiver there"
        )


def require_tls(placements: Iterable[Placement], environment: Mapping[str, str]) -> None:
    """Where encryption is on, see that what goes to other machines goes by TLS.

    Raises:
        ConfigurationError: by an address it would go in clear text, or to whoever answers.
    """
    for each in placements if environment.get(ENCRYPTION) else ():
        if end := clear_end(each.where):
            raise ConfigurationError(
                f"{each.setting or each.what} names {end} without TLS that is verified, and "
                f"{ENCRYPTION} is set; expected https, rediss or ssl=true, mailtos, or sslmode="
                f"verify-full: loopback alone may go without. {NOTHING}"
            )
