"""What a training took: time by phase of each rank, energy and money."""

from __future__ import annotations

from tasks.contracts.telemetry import RankTelemetry, TrainingTelemetry
from tasks.reporting.quantities import (
    count,
    decimal,
    duration,
    is_shown,
    plural,
    significant,
)

MOST_RANKS = 16
J_PER_KWH = 3.6e6
# Phase, what it is called, how its piece is drawn. Neighbours differ in lightness too, and a piece
# that is wide enough carries its share.
PIECES = (
    ("compute", "computing", "s1"),
    ("data", "waiting for rows", "s3"),
    ("exchange", "exchanging", "s2"),
    ("validate", "validating", "s1 soft"),
    ("checkpoint", "checkpoints", "s3 soft"),
    ("other", "other", "quiet"),
)


def describe_cost(telemetry: TrainingTelemetry) -> str:
    """Time, rates, energy and money in a paragraph; what is not known is said with its reason."""
    attempts = f" in {telemetry.num_attempts} attempts" if telemetry.num_attempts > 1 else ""
    rates = [r.rows_per_s for r in telemetry.ranks if is_shown(r.rows_per_s)]
    speed = "no rank trained long enough for a rate"
    if rates:
        ranks = plural(len(telemetry.ranks), "rank")
        speed = f"{ranks} trained on {count(sum(rates))} rows a second in all"
    return (
        f"The training took {duration(telemetry.seconds)}{attempts}; {speed}. "
        f"{_energy(telemetry)} {_money(telemetry)}"
    )


def _energy(telemetry: TrainingTelemetry) -> str:
    energy = telemetry.energy
    if not is_shown(energy.joules):
        return f"Its energy is not known: {energy.known_by}."
    about = "about " if energy.estimated else ""
    amount = f"{significant(energy.joules)} J ({significant(energy.joules / J_PER_KWH)} kWh)"
    return f"It used {about}{amount} of energy ({energy.known_by})."


def _money(telemetry: TrainingTelemetry) -> str:
    cost = telemetry.cost
    if cost is None:
        return "Its cost is not known: the configuration names no price that could be used."
    named = ((cost.energy_part, "energy"), (cost.node_part, "the use of hosts"))
    parts = [f"{money(part)} for {what}" for part, what in named if is_shown(part)]
    return f"It cost {money(cost.amount)} {cost.currency}: {' and '.join(parts)}."


def money(amount: float) -> str:
    """Two digits behind the point, or two significant ones where it is less than that."""
    return decimal(amount, 2) if amount >= 0.1 or amount == 0 else significant(amount, 2)


def shown_ranks(telemetry: TrainingTelemetry) -> list[RankTelemetry]:
    """All ranks, or those with the lowest rates where they are too many."""
    if len(telemetry.ranks) <= MOST_RANKS:
        return list(telemetry.ranks)
    return sorted(telemetry.ranks, key=lambda r: r.rows_per_s or 0.0)[:MOST_RANKS]


def phases(rank: RankTelemetry) -> list[tuple[str, str, float]]:
    """Name, kind of piece and seconds of each phase that took time."""
    found = [(name, kind, rank.phases.get(phase)) for phase, name, kind in PIECES]
    return [
        (name, kind, time.seconds)
        for name, kind, time in found
        if time is not None and is_shown(time.seconds) and time.seconds > 0
    ]


def longest(telemetry: TrainingTelemetry) -> float:
    """Seconds of the rank that took longest, of those that are shown."""
    every = [sum(s for _, _, s in phases(rank)) for rank in shown_ranks(telemetry)]
    return max(every, default=0.0) or 1.0
