"""What a check found: where, what was seen and expected, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tasks.kernel.errors import ConfigurationError, FalajError

Severity = Literal["error", "warning"]
Kind = Literal["configuration", "data"]
EXIT_CONFIGURATION, EXIT_DATA = 2, 4
_LAST = re.compile(r"\s*(Nothing|No \w+) (was|were) [^.;]*\.?$")
"""How a sentence of ours ends that says what was left undone: a check changes nothing anyhow."""


@dataclass(frozen=True)
class Finding:
    """One mistake, or one thing to look at.

    Attributes:
        check: what was looked at, such as `schema`, `rows`, `queries` or `leaks`.
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


def finding_of(
    exc: FalajError, check: str, file: str, line: int | None = None, *, action: str = ""
) -> Finding:
    """The finding that an error of another stage makes: its sentence, cut where advice begins."""
    text = _LAST.sub("", " ".join(str(exc).split()))
    if in_file := re.match(r"[\w./-]+, line (\d+): ", text):
        line = int(in_file[1])
    seen, found, rest = text.partition("; expected ")
    expected = ""
    if found:
        expected, *more = re.split(r"[.;] ", rest, maxsplit=1)
        rest = "".join(more)
    else:
        seen, found, rest = _first_sentence(text)
    return Finding(
        check=check,
        kind="configuration" if isinstance(exc, ConfigurationError) else "data",
        file=file,
        line=line,
        seen=seen,
        expected=expected.removesuffix("."),
        action=action or _as_advice(rest) or f"mend it in {file}",
    )


def _first_sentence(text: str) -> tuple[str, str, str]:
    for separator in (". ", "; "):
        head, found, rest = text.partition(separator)
        if found:
            return head, found, rest
    return text, "", ""


def _as_advice(text: str) -> str:
    advice = text.strip().removesuffix(".")
    return advice[:1].lower() + advice[1:]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that somebody most likely meant."""
    names = {str(n).casefold(): str(n) for n in known}
    found = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean x? ` where a known name is near, else nothing."""
    near = nearest(name, known)
    return f"did you mean {near}? " if near else ""


class YamlPlaces:
    """Lines of what a YAML file says, by the path to it."""

    def __init__(self, file: Path) -> None:
        self._root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)

    def line(self, *path: str | int) -> int:
        """Line of the last name of a path that the file has, counted from 1.

        Steps that only a validator knows, such as the kind of a union, are passed over.
        """
        node, line = self._root, 1
        for step in path:
            for key, value in _entries(node):
                if (key.value if isinstance(key, yaml.ScalarNode) else key) == step:
                    start = (value if isinstance(step, int) else key).start_mark
                    node, line = value, start.line + 1
                    break
        return line

    def declared(self, sentence: str, otherwise: int) -> int:
        """Line of the table that a sentence calls `<name> (declared in use_case.yaml)`."""
        found = re.search(r"(\w+) \(declared in ", sentence)
        if found and found[1] == "training_set":
            return self.line("features", "training_set")
        tables = _by_name(_by_name(self._root).get("features")).get("feature_tables")
        for table in tables.value if found and isinstance(tables, yaml.SequenceNode) else ():
            if getattr(_by_name(table).get("name"), "value", None) == found[1]:  # type: ignore[index]
                return int(table.start_mark.line) + 1
        return otherwise

    def first(self, *names: str) -> int:
        """Line of the first of these names that the file has at its top."""
        return next((line for name in names if (line := self.line(name)) > 1), 1)


def _by_name(node: yaml.Node | None) -> dict[str, yaml.Node]:
    entries = node.value if isinstance(node, yaml.MappingNode) else []
    return {key.value: value for key, value in entries if isinstance(key, yaml.ScalarNode)}


def _entries(node: yaml.Node | None) -> list[tuple[Any, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        return [(key, value) for key, value in node.value]
    return list(enumerate(node.value)) if isinstance(node, yaml.SequenceNode) else []


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without an error, 2 where one is of the configuration, 4 where all are of the data."""
    kinds = {finding.kind for finding in findings if finding.severity == "error"}
    if "configuration" in kinds:
        return EXIT_CONFIGURATION
    return EXIT_DATA if kinds else 0
