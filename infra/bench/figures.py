"""What the benches measure: figures with a bound, and what could not be measured here.

What is compared is measured in turns, so that a busy machine is busy for all.
"""

import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def interleaved(calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each call gives in each round, in an order drawn anew; a first round is not counted."""
    order, draw = list(calls), random.Random(0)
    found: dict[str, list[T]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        draw.shuffle(order)
        for name in order:
            value = calls[name]()
            if number:
                found[name].append(value)
    return found


def seconds(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def children_cpu_s() -> float:
    """CPU seconds of all that this process has started, once it was waited for."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


@dataclass(frozen=True)
class Figure:
    """One measured figure, its bound, and what it was measured on.

    Attributes:
        value: None where there is nothing that could have the figure, or it is no finite number;
            such a figure misses every bound.
        bound: None where the figure is only reported.
        at_least: whether the bound is the least value; else it is the largest.
    """

    name: str
    value: float | None
    bound: float | None
    at_least: bool
    evidence: str

    @property
    def holds(self) -> bool:
        """True where the figure keeps its bound."""
        if self.value is None or self.bound is None:
            return self.value is not None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def bound_text(self) -> str:
        """The bound with its sign; nothing where there is none."""
        if self.bound is None:
            return ""
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"

    @property
    def value_text(self) -> str:
        """The value as it is printed."""
        return "none" if self.value is None else f"{self.value:.3f}"

    def line(self) -> str:
        """The figure as one line of the table."""
        state = "ok  " if self.holds else "MISS"
        return (
            f"{state}  {self.name:<44}{self.value_text:>9}  {self.bound_text:<11} {self.evidence}"
        )


@dataclass(frozen=True)
class LeftOut:
    """A figure that this host cannot have, and why."""

    name: str
    reason: str

    def line(self) -> str:
        """It as one line of the table."""
        return f"none  {self.name}: not measured, {self.reason}"


Measured = list[Figure | LeftOut]


def at_most(name: str, value: float, bound: float, evidence: str) -> Figure:
    """A figure that must not exceed its bound."""
    return Figure(name, _finite(value), bound, False, evidence)


def at_least(name: str, value: float, bound: float, evidence: str) -> Figure:
    """A figure that must reach its bound."""
    return Figure(name, _finite(value), bound, True, evidence)


def reported(name: str, value: float, evidence: str) -> Figure:
    """A figure without a bound."""
    return Figure(name, _finite(value), None, False, evidence)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
