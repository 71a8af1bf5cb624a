"""What every deployed thing has in common: it is compared, and written where it differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

MISSING = "is missing"
LONGEST_VALUE = 60
"""Characters of a value in a difference; the rest is cut."""


@dataclass(frozen=True)
class Comparison:
    """One thing as it should be, beside the same thing as the server has it."""

    differences: tuple[str, ...] = ()
    """What has to change, in words; empty where all is as it should be."""
    notes: tuple[str, ...] = ()
    """What a person chose on the server, and a deploy leaves alone."""

    @property
    def is_equal(self) -> bool:
        """True where nothing has to change."""
        return not self.differences


class Item(Protocol):
    """A pool, queue, block, deployment or automation as it should be."""

    @property
    def label(self) -> str:
        """Kind and name, such as `deployment training/cpu`."""

    async def compare(self, client: PrefectClient) -> Comparison:
        """Read the server's and compare; changes nothing."""

    async def write(self, client: PrefectClient) -> None:
        """Make the server's as this one is; only called where they differ."""


@dataclass
class Outcome:
    """What a deploy, or a check, found and did."""

    equal: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, label: str, found: Comparison) -> None:
        """Take up one comparison."""
        self.differences += [f"{label}: {difference}" for difference in found.differences]
        self.notes += [f"{label}: {note}" for note in found.notes]
        if found.is_equal:
            self.equal.append(label)


def differences(wanted: object, found: object, place: str = "") -> Iterator[str]:
    """Where two JSON values differ: the path to each place, and both values there."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key in sorted({*wanted, *found}, key=str):
            inner = f"{place}.{key}" if place else str(key)
            if key not in found:
                yield f"{inner} {MISSING} on the server; it should be {_shown(wanted[key])}"
            elif key not in wanted:
                yield f"{inner} is on the server alone: {_shown(found[key])}"
            else:
                yield from differences(wanted[key], found[key], inner)
    elif wanted != found:
        yield f"{place} should be {_shown(wanted)} and is {_shown(found)} on the server"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
