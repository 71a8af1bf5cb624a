"""Scales, ticks and the frame that charts are drawn in. Lengths are pixels, y grows downward."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from markupsafe import Markup

from tasks.reporting.quantities import decimal, is_shown, significant
from tasks.reporting.svg import label, line, tag

TICK_GAP = 6.0
LEAST_TICK_DISTANCE = 34.0


class Scale(Protocol):
    """Maps values to pixels and knows where its ticks are."""

    def __call__(self, value: float) -> float:
        """Pixel of a value; values outside the domain are drawn at its edge."""
        ...

    def ticks(self) -> list[tuple[float, str]]:
        """Values worth a grid line, and how they are written."""
        ...


@dataclass(frozen=True)
class Linear:
    """Equal steps are equally long."""

    low: float
    high: float
    start: float
    end: float
    num_ticks: int = 5
    whole_numbers: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values, no closer than their words allow."""
        fitting = max(1, int(abs(self.end - self.start) // LEAST_TICK_DISTANCE))
        step = tick_step(self.low, self.high, min(self.num_ticks, fitting))
        if self.whole_numbers:
            step = max(1.0, math.ceil(step))
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        if round(step, digits) != round(step, digits + 1):  # 0.25 takes a digit more than 0.2
            digits += 1
        first, last = math.ceil(self.low / step - 1e-6), math.floor(self.high / step + 1e-6)
        return [(k * step, decimal(k * step + 0.0, digits)) for k in range(first, last + 1)]


@dataclass(frozen=True)
class Logarithmic:
    """Equal factors are equally long; the domain is positive."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Powers of ten."""
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        return [(10.0**k, significant(10.0**k, 1)) for k in range(first, last + 1)]


def tick_step(low: float, high: float, wanted: int) -> float:
    """The round step (1, 2, 2.5 or 5 times a power of ten) that gives at most `wanted` ticks."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))


def domain(values: Iterable[float], *, margin: float = 0.06) -> tuple[float, float]:
    """Lowest and highest drawable value with a margin; never empty, whatever comes in."""
    shown = [v for v in values if is_shown(v)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    if high - low < 1e-9 * max(1.0, abs(high), abs(low)):
        half = max(abs(high) * 0.05, 0.5 if high == round(high) else 0.005)
        return low - half, high + half
    spare = (high - low) * margin
    return low - spare, high + spare


def powers_around(values: Iterable[float]) -> tuple[float, float]:
    """Powers of ten around the drawable positive values."""
    shown = [v for v in values if is_shown(v) and v > 1e-12]
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
    first = math.floor(math.log10(low) - 0.05)
    return 10.0**first, 10.0 ** max(first + 1, math.ceil(math.log10(high) + 0.05))


def round_up(value: float) -> float:
    """The next tick at or above a positive value, for an axis from zero."""
    top = value if is_shown(value) and value > 1e-9 else 1.0
    step = tick_step(0.0, top, 5)
    return math.ceil(top / step - 1e-6) * step


@dataclass(frozen=True)
class Frame:
    """The plotting area of one chart, with grid, tick labels and axis titles."""

    x: Scale
    y: Scale
    left: float
    top: float
    right: float
    bottom: float

    def grid(self, x_title: str, y_title: str) -> Markup:
        """Everything behind the data."""
        return tag("g", self._columns(), self._rows(), self._titles(x_title, y_title))

    def _columns(self) -> Markup:
        parts = []
        for value, text in self.x.ticks():
            at = self.x(value)
            parts.append(line(at, self.top, at, self.bottom, "grid"))
            parts.append(label(text, at, self.bottom + 17, anchor="middle", kind="tick"))
        return Markup("").join(parts)

    def _rows(self) -> Markup:
        parts = []
        for value, text in self.y.ticks():
            at = self.y(value)
            parts.append(line(self.left, at, self.right, at, "grid"))
            parts.append(label(text, self.left - TICK_GAP, at + 4, anchor="end", kind="tick"))
        return Markup("").join(parts)

    def _titles(self, x_title: str, y_title: str) -> Markup:
        middle = (self.left + self.right) / 2
        return Markup("").join(
            [
                line(self.left, self.bottom, self.right, self.bottom, "axis"),
                label(x_title, middle, self.bottom + 36, anchor="middle", kind="axis-title"),
                label(y_title, 4, self.top - 20, kind="axis-title"),
            ]
        )
