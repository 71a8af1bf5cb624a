"""What a training took: time by phase of each rank, energy and money, and what held it back."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.contracts.telemetry import RankTelemetry, TrainingTelemetry
from tasks.reporting.quantities import (
    count,
    decimal,
    duration,
    is_shown,
    percent,
    plural,
    shortened,
    significant,
    size,
)

MOST_RANKS = 16
J_PER_KWH = 3.6e6
LARGE_J = 1e5
"""Above it, energy is told in kilowatt hours too."""
# Phase, what it is called, how its piece is drawn. Neighbours differ in lightness too, and a piece
# that is wide enough carries its name.
PIECES = (
    ("compute", "computing", "s1"),
    ("data", "waiting for rows", "s3"),
    ("exchange", "exchanging", "s2"),
    ("validate", "validating", "s1 soft"),
    ("checkpoint", "checkpoints", "s3 soft"),
    ("other", "other", "quiet"),
)


def shown_ranks(told: TrainingTelemetry) -> tuple[RankTelemetry, ...]:
    """All ranks, or those with the lowest rates where they are too many."""
    if len(told.ranks) <= MOST_RANKS:
        return told.ranks
    return tuple(sorted(told.ranks, key=lambda r: r.rows_per_s or 0.0)[:MOST_RANKS])


def describe_cost(told: TrainingTelemetry) -> str:
    """The section in a paragraph: time, rates, energy, money."""
    attempts = f" in {told.num_attempts} attempts" if told.num_attempts > 1 else ""
    rates = [r.rows_per_s for r in told.ranks if is_shown(r.rows_per_s)]
    speed = (
        f"its {plural(len(told.ranks), 'rank')} trained on {count(sum(rates))} rows a second"
        + (" together" if len(told.ranks) > 1 else "")
        if rates
        else "no rank trained long enough for a rate"
    )
    return (
        f"The training took {duration(told.seconds)}{attempts}; {speed}. {describe_energy(told)} "
        f"{describe_money(told)}"
    )


def describe_energy(told: TrainingTelemetry) -> str:
    """Energy in a sentence, or why it is not known."""
    energy = told.energy
    if not is_shown(energy.joules):
        return f"Its energy is not known: {energy.known_by}."
    amount = f"{significant(energy.joules)} J"
    if energy.joules >= LARGE_J:
        amount += f" ({significant(energy.joules / J_PER_KWH)} kWh)"
    if energy.estimated:
        return f"It used about {amount} of energy, {energy.known_by}."
    return f"It used {amount} of energy ({energy.known_by})."


def describe_money(told: TrainingTelemetry) -> str:
    """Cost in a sentence, or why it is not known."""
    cost = told.cost
    if cost is None:
        return "Its cost is not known: the configuration names no price that could be used."
    parts = []
    if is_shown(cost.energy_part):
        parts.append(f"{money(cost.energy_part)} for energy")
    if is_shown(cost.node_part):
        parts.append(f"{money(cost.node_part)} for the use of hosts")
    return f"It cost {money(cost.amount)} {cost.currency}: {' and '.join(parts)}."


def money(amount: float) -> str:
    """Two digits behind the point, or two significant ones where it is less than that."""
    return decimal(amount, 2) if amount >= 0.1 or amount == 0 else significant(amount, 2)


@dataclass(frozen=True)
class Piece:
    """A part of a rank's bar: `share` of the longest rank's time, `kind` a class of the page."""

    name: str
    kind: str
    share: float
    text: str
    tip: str


def rank_bars(telemetry: TrainingTelemetry) -> list[tuple[str, list[Piece], str]]:
    """Name, pieces by phase and rate of each rank; bars are as long as the ranks' work lasted."""
    ranks = shown_ranks(telemetry)
    longest_s = longest(telemetry)
    return [
        (
            f"rank {rank.rank} · {shortened(rank.host, 12)}",
            [
                _piece(rank, phase, name, kind, longest_s)
                for phase, name, kind in PIECES
                if _phase_s(rank, phase)
            ],
            f"{count(rank.rows_per_s)} rows/s" if is_shown(rank.rows_per_s) else "no rate",
        )
        for rank in ranks
    ]


def longest(telemetry: TrainingTelemetry) -> float:
    """Seconds of the rank that took longest, of those that are shown."""
    return max((_elapsed_s(rank) for rank in shown_ranks(telemetry)), default=0.0) or 1.0


def _piece(rank: RankTelemetry, phase: str, name: str, kind: str, longest_s: float) -> Piece:
    seconds = _phase_s(rank, phase)
    share = seconds / _elapsed_s(rank)
    wide = seconds / longest_s
    return Piece(
        name=name,
        kind=kind,
        share=wide,
        text=percent(share, 0) if wide > 0.04 else "",
        tip=f"rank {rank.rank}, {name}: {duration(seconds)}, {percent(share)}",
    )


def _phase_s(rank: RankTelemetry, phase: str) -> float:
    time = rank.phases.get(phase)
    return time.seconds if time is not None and is_shown(time.seconds) else 0.0


def _elapsed_s(rank: RankTelemetry) -> float:
    return sum(_phase_s(rank, phase) for phase, _, _ in PIECES)


def host_facts(told: TrainingTelemetry) -> tuple[tuple[str, str], ...]:
    """The host while the training lasted: name of each fact, and the fact."""
    host = told.host
    facts = [
        ("Host", f"{host.name}, {plural(host.num_cores, 'core')}, {size(host.memory_bytes)}"),
        (
            "Cores busy (all programs)",
            f"{percent(host.cpu_share_mean, 0)}, at most {percent(host.cpu_share_max, 0)}",
        ),
        (
            "Network",
            f"{size(host.network_sent_bytes)} sent, {size(host.network_received_bytes)} received, "
            f"{size(host.loopback_bytes)} within the host",
        ),
        (
            "Temperature",
            "no sensor"
            if host.temperature_max_c is None
            else f"at most {decimal(host.temperature_max_c, 0)} °C",
        ),
    ]
    if host.swapped_in_bytes:
        facts.append(("Read back from swap", size(host.swapped_in_bytes)))
    return tuple(facts)
