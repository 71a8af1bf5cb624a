"""What a check found: where, what was seen and expected, what to do."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from falaj.context import EXIT_DATA, EXIT_WRONG_INPUT
from tasks.kernel.errors import ConfigurationError, FalajError, WindowError
from tasks.kernel.settings import USE_CASE_FILE

Severity = Literal["error", "warning"]
Kind = Literal["configuration", "data"]
Place = tuple[str, int | None]
"""A file, as the use case names it, and a line of it, counted from 1."""
_LAST = re.compile(r"\s*(Nothing|No \w+) (was|were) [^.;]*\.?$")
"""How a sentence of ours ends that says what was left undone: a check changes nothing anyhow."""


@dataclass(frozen=True)
class Finding:
    """One mistake, or one thing to look at.

    Attributes:
        check: name of the mistake, or what was looked at: `schema`, `rows`, `queries`.
        kind: who is to act: whoever writes the use case, or whoever sends the data.
        severity: a warning changes no exit code.
        file: file that it is in, as the use case names it.
        line: line in that file, counted from 1.
        column: column of a table.
    """

    check: str
    kind: Kind
    file: str
    seen: str
    action: str
    expected: str = ""
    line: int | None = None
    column: str | None = None
    severity: Severity = "error"

    @property
    def place(self) -> str:
        """Such as `orders.csv:17, column amount`."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}, column {self.column}" if self.column else where

    def lines(self) -> list[str]:
        """As a person reads it."""
        expected = f"; expected {self.expected}" if self.expected else ""
        return [f"{self.severity} {self.place}", f"  {self.seen}{expected}", f"  -> {self.action}"]

    def facts(self) -> dict[str, Any]:
        """As a program reads it."""
        return {**asdict(self), "place": self.place}


class Findings:
    """What was found so far in the project of a folder."""

    def __init__(self, repo: Path) -> None:
        self.repo = repo
        self.found: list[Finding] = []

    def add(
        self,
        mistake: str,
        place: Place,
        column: str | None = None,
        *,
        severity: Severity | None = None,
        **values: object,
    ) -> None:
        """Note what `findings.yaml` describes under a name, with these values."""
        said = _described()["mistakes"][mistake]
        kind, _, is_grave = said["is"].partition(" ")
        seen, action, expected = (
            said.get(part, "").format(**values, column=column)
            for part in ("seen", "do", "expected")
        )
        (file, line), grave = place, severity or is_grave or "error"
        self.found.append(Finding(mistake, kind, file, seen, action, expected, line, column, grave))

    def add_error(self, exc: FalajError, check: str, place: Place, action: str = "") -> None:
        """Note an error of another stage: its sentence, cut where advice begins."""
        text = _LAST.sub("", " ".join(str(exc).split()))
        seen, found, rest = text.partition("; expected ")
        expected, *more = re.split(r"[.;] ", rest, maxsplit=1) if found else [""]
        if not found:
            seen, *more = text.split(". " if ". " in text else "; ", 1)
        lines = re.findall(r"[Ll]ine:? (\d+)", text)
        advice = "".join(more).strip().removesuffix(".")
        action = action or advised(text) or advice[:1].lower() + advice[1:]
        is_configuration = isinstance(exc, ConfigurationError | WindowError)
        kind: Kind = "configuration" if is_configuration else "data"
        file, line = place[0], place[1] or (int(lines[-1]) if lines else None)
        expected, action = expected.removesuffix("."), action or f"mend it in {file}"
        self.found.append(Finding(check, kind, file, seen, action, expected, line))

    def at(self, *path: str | int) -> Place:
        """Line of the last name of a path that `use_case.yaml` has.

        Items of a list go by their number or their `name`. Steps that only a validator knows, such
        as the kind of a union, are passed over.
        """
        node, line = self._root, 1
        for step in path:
            for names, value, mark in _entries(node):
                if step in names:
                    node, line = value, mark.line + 1
                    break
        return USE_CASE_FILE, line

    def declared(self, sentence: str, *otherwise: str | int) -> Place:
        """Line of the table that a sentence calls `<name> (declared in use_case.yaml)`."""
        if found := re.search(r"(\w+) \(declared in ", sentence):
            tables = () if found[1] == "training_set" else ("feature_tables",)
            return self.at("features", *tables, found[1])
        return self.at(*otherwise)

    def naming(self, value: str) -> Place:
        """Line of a value that `use_case.yaml` has somewhere."""
        waiting = [self._root]
        while waiting:
            for _, node, mark in _entries(waiting.pop()):
                if node.value == value:
                    return USE_CASE_FILE, mark.line + 1
                waiting.append(node)
        return USE_CASE_FILE, None

    @cached_property
    def _root(self) -> yaml.Node | None:
        text = (self.repo / USE_CASE_FILE).read_text(encoding="utf-8")
        return yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _entries(node: Any) -> Iterator[tuple[tuple[Any, ...], yaml.Node, yaml.Mark]]:
    if isinstance(node, yaml.MappingNode):
        yield from (((key.value,), value, key.start_mark) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            named = (value.value for names, value, _ in _entries(item) if names == ("name",))
            yield (number, *named), item, item.start_mark


@cache
def _described() -> dict[str, Any]:
    text = Path(__file__).with_name("findings.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)  # type: ignore[no-any-return]


def advised(text: str) -> str:
    """What `findings.yaml` advises about a sentence or a value; empty where nothing fits."""
    fits = (a["do"] for a in _described()["advice"] if re.search(a["says"], text))
    return next(fits, "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that somebody most likely meant."""
    names = {str(n).casefold(): str(n) for n in known}
    found = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean x? ` where a known name is near, else nothing."""
    near = nearest(name, known)
    return f"did you mean {near}? " if near else ""


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without an error, 2 where one is of the configuration, 4 where all are of the data."""
    kinds = {finding.kind for finding in findings if finding.severity == "error"}
    return EXIT_WRONG_INPUT if "configuration" in kinds else EXIT_DATA if kinds else 0
