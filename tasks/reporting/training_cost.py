"""What a training took: time by phase of each rank, energy and money, and what held it back."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

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
from tasks.reporting.svg import label, line, picture, tag, text_width

MOST_RANKS = 16
WIDTH = 1060.0
NAME_WIDTH, NOTE_WIDTH = 150.0, 110.0
TOP, ROW, BAR = 40.0, 34.0, 22.0
FOOT = 26.0
J_PER_KWH = 3.6e6
LARGE_J = 1e5
"""Above it, energy is told in kilowatt hours too."""
# Phase, what it is called, how its piece is drawn. Neighbours differ in lightness too, and a piece
# that is wide enough carries its name.
PIECES = (
    ("compute", "computing", "bar s1"),
    ("data", "waiting for rows", "bar s3"),
    ("exchange", "exchanging", "bar s2"),
    ("validate", "validating", "bar soft s1"),
    ("checkpoint", "checkpoints", "bar soft s3"),
    ("other", "other", "bar quiet"),
)


def shown_ranks(told: TrainingTelemetry) -> tuple[RankTelemetry, ...]:
    """All ranks, or those with the lowest rates where they are too many."""
    if len(told.ranks) <= MOST_RANKS:
        return told.ranks
    return tuple(sorted(told.ranks, key=lambda r: r.rows_per_s or 0.0)[:MOST_RANKS])


def cost_told(told: TrainingTelemetry) -> str:
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
        f"The training took {duration(told.seconds)}{attempts}; {speed}. {energy_told(told)} "
        f"{money_told(told)}"
    )


def energy_told(told: TrainingTelemetry) -> str:
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


def money_told(told: TrainingTelemetry) -> str:
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


def phases_chart(told: TrainingTelemetry) -> Markup:
    """One bar for each rank, as long as its work lasted, a piece for each phase."""
    ranks = shown_ranks(told)
    longest_s = max((_elapsed_s(rank) for rank in ranks), default=0.0) or 1.0
    rows = [_rank_bar(rank, TOP + ROW * n, longest_s) for n, rank in enumerate(ranks)]
    bottom = TOP + ROW * max(len(ranks), 1)
    axis = _time_axis(longest_s, bottom)
    legend = _legend([piece for piece in PIECES if any(_phase_s(r, piece[0]) for r in ranks)])
    description = "; ".join(_rank_told(rank) for rank in ranks) or "No rank was measured."
    return picture(
        "Time of each rank by phase",
        description,
        WIDTH,
        bottom + FOOT,
        axis,
        *rows,
        legend,
        kind="flow",
    )


def _rank_bar(rank: RankTelemetry, y: float, longest_s: float) -> Markup:
    scale = (WIDTH - NAME_WIDTH - NOTE_WIDTH) / longest_s
    at, parts = NAME_WIDTH, []
    for phase, name, kind in PIECES:
        seconds = _phase_s(rank, phase)
        wide = seconds * scale
        if wide <= 0:
            continue
        share = seconds / _elapsed_s(rank)
        tip = f"rank {rank.rank}, {name}: {duration(seconds)}, {percent(share)}"
        box = {"x": at, "y": y, "width": max(wide - 1.5, 0.5), "height": BAR, "rx": 2.0}
        parts.append(tag("rect", tag("title", tip), class_=kind, **box))
        if text_width(percent(share, 0)) + 8 < wide:
            on_dark = "numeral" if "soft" not in kind and "quiet" not in kind else "label"
            middle = at + (wide - 1.5) / 2
            parts.append(label(percent(share, 0), middle, y + 15, anchor="middle", kind=on_dark))
        at += wide
    rate = f"{count(rank.rows_per_s)} rows/s" if is_shown(rank.rows_per_s) else "no rate"
    name = f"rank {rank.rank} · {shortened(rank.host, 12)}"
    return tag(
        "g",
        label(name, NAME_WIDTH - 12, y + 15, anchor="end", kind="strong"),
        *parts,
        label(rate, WIDTH - NOTE_WIDTH + 10, y + 15),
    )


def _time_axis(longest_s: float, bottom: float) -> Markup:
    right = WIDTH - NOTE_WIDTH
    return tag(
        "g",
        line(NAME_WIDTH, bottom, right, bottom, "axis"),
        label("0", NAME_WIDTH, bottom + 16, kind="tick"),
        label(duration(longest_s), right, bottom + 16, anchor="end", kind="tick"),
    )


def _legend(pieces: Sequence[tuple[str, str, str]]) -> Markup:
    at, parts = NAME_WIDTH, []
    for _, name, kind in pieces:
        parts.append(tag("rect", x=at, y=8.0, width=12.0, height=12.0, rx=2.0, class_=kind))
        parts.append(label(name, at + 18, 18))
        at += 18 + text_width(name) + 22
    return tag("g", *parts)


def _phase_s(rank: RankTelemetry, phase: str) -> float:
    time = rank.phases.get(phase)
    return time.seconds if time is not None and is_shown(time.seconds) else 0.0


def _elapsed_s(rank: RankTelemetry) -> float:
    return sum(_phase_s(rank, phase) for phase, _, _ in PIECES)


def _rank_told(rank: RankTelemetry) -> str:
    whole = _elapsed_s(rank) or 1.0
    shares = ", ".join(
        f"{name} {percent(_phase_s(rank, phase) / whole, 0)}"
        for phase, name, _ in PIECES
        if _phase_s(rank, phase)
    )
    return f"rank {rank.rank}: {shares}"


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
