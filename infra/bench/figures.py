"""A measured figure and the bound it must keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measured figure, its bound, and what it was measured on."""

    name: str
    value: float
    bound: float
    at_least: bool
    evidence: str

    @property
    def holds(self) -> bool:
        """True where the figure keeps its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """The figure as one line of the table."""
        sign = ">=" if self.at_least else "<="
        state = "ok  " if self.holds else "MISS"
        return (
            f"{state}  {self.name:<44}{self.value:>9.3f}  {sign} {self.bound:<8g} {self.evidence}"
        )


def at_most(name: str, value: float, bound: float, evidence: str) -> Figure:
    """A figure that must not exceed its bound."""
    return Figure(name, value, bound, False, evidence)


def at_least(name: str, value: float, bound: float, evidence: str) -> Figure:
    """A figure that must reach its bound."""
    return Figure(name, value, bound, True, evidence)
