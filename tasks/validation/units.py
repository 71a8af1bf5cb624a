"""Units that columns come in, and the mistakes that people make with them.

A `Mistake` is how a value looks after somebody wrote it otherwise, and its repair: the SQL that
takes it back. Diagnosis repairs a refused table and asks whether it passes then.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Unit = Literal[
    "fahrenheit", "mile", "mile_per_hour", "minute", "inch", "millibar", "foot", "per_cent"
]


class Mistake(NamedTuple):
    """A wrong way to write a value: `seen = right * scale + offset`."""

    name: str
    scale: float
    offset: float = 0.0

    def repair(self, column: str, integer: bool) -> str:
        """SQL expression that gives the right value back."""
        right = f"({column} - ({self.offset!r})) / ({self.scale!r})"
        return f"round({right})::BIGINT" if integer else right


CONVERSIONS: dict[Unit, tuple[Mistake, ...]] = {
    "fahrenheit": (
        Mistake("degrees Celsius instead of Fahrenheit", 1 / 1.8, -32 / 1.8),
        Mistake("kelvin instead of degrees Fahrenheit", 1 / 1.8, 273.15 - 32 / 1.8),
    ),
    "mile": (
        Mistake("kilometres instead of miles", 1.609344),
        Mistake("nautical miles instead of miles", 1.609344 / 1.852),
        Mistake("metres instead of miles", 1609.344),
    ),
    "mile_per_hour": (
        Mistake("metres a second instead of miles an hour", 0.44704),
        Mistake("kilometres an hour instead of miles an hour", 1.609344),
        Mistake("knots instead of miles an hour", 1 / 1.150779),
    ),
    "minute": (
        Mistake("hours instead of minutes", 1 / 60),
        Mistake("seconds instead of minutes", 60.0),
    ),
    "inch": (
        Mistake("millimetres instead of inches", 25.4),
        Mistake("centimetres instead of inches", 2.54),
    ),
    "millibar": (
        Mistake("inches of mercury instead of millibars", 1 / 33.8639),
        Mistake("pascals instead of millibars", 100.0),
        Mistake("kilopascals instead of millibars", 0.1),
        Mistake("millimetres of mercury instead of millibars", 0.750062),
    ),
    "foot": (Mistake("metres instead of feet", 0.3048),),
    "per_cent": (Mistake("a fraction instead of per cent", 0.01),),
}
"""Other units in which values of one are delivered by mistake."""

SCALINGS = (
    Mistake("values ten times too large", 10.0),
    Mistake("values ten times too small", 0.1),
    Mistake("values a hundred times too large", 100.0),
    Mistake("values a thousand times too large", 1000.0),
    Mistake("the sign flipped", -1.0),
)
"""Mistakes that can happen to any number."""
