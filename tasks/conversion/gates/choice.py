"""Which variant serves each goal on the measured hardware, by rule and from recorded figures alone.

The best figure of the accepted variants that meet the goal's bounds sets the mark. Of those that
reach it within `minimum_gain` the simplest is chosen: what is more complex has to be worth it.
Anyone can repeat the choice from the variants' records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.contracts.conversion import GoalStanding, VariantLatency, VariantPrice
from tasks.contracts.release import ModelVariant
from tasks.conversion.config import ConversionConfig, Goal
from tasks.conversion.gates.timing import MILLION

SECONDS_AN_HOUR = 3600.0
THROUGHPUT_ROWS = 32
"""Rows of a call when all cores ask at once: a call that a dynamic batch of a server makes."""


@dataclass(frozen=True)
class _Measured:
    """A variant's figure for a goal, or why it cannot serve it."""

    figure: float | None
    objection: str | None = None


def choose(
    variants: tuple[ModelVariant, ...], config: ConversionConfig
) -> tuple[ModelVariant, ...]:
    """The same variants, each with its price and its standing for every goal.

    Args:
        variants: judged on one hardware class, from simple to complex.
        config: goals, price, and how much better a more complex variant has to be.
    """
    variants = tuple(v.model_copy(update={"price": price_of(v, config)}) for v in variants)
    by_goal = [_standings(name, goal, variants, config) for name, goal in config.goals.items()]
    return tuple(
        variant.model_copy(update={"standings": tuple(of_goal[number] for of_goal in by_goal)})
        for number, variant in enumerate(variants)
    )


def price_of(variant: ModelVariant, config: ConversionConfig) -> VariantPrice | None:
    """What a million rows cost on the measured hardware; None where throughput was not measured.

    Processor seconds times the price of a core; of a GPU the seconds that it is taken.
    """
    if variant.throughput is None:
        return None
    seconds = variant.throughput.cpu_s_per_million
    if variant.hardware_class.startswith("gpu"):
        seconds = MILLION / variant.throughput.rows_per_s.value
    return VariantPrice(
        per_million=seconds / SECONDS_AN_HOUR * config.price_per_core_hour,
        per_core_hour=config.price_per_core_hour,
        currency=config.currency,
    )


def _standings(
    name: str, goal: Goal, variants: tuple[ModelVariant, ...], config: ConversionConfig
) -> list[GoalStanding]:
    """The standing of each variant for one goal."""
    measured = {variant.name: _measure(variant, goal) for variant in variants}
    unit = {
        "latency": "ms",
        "throughput": "rows/s",
        "cost": f"{config.currency} per million rows",
    }[goal.best]
    chosen = _chosen(measured, goal, config.minimum_gain)
    return [
        GoalStanding(
            goal=name,
            rule=_rule(goal, config),
            figure=of.figure,
            unit=unit,
            chosen=variant == chosen,
            reason=of.objection or _reason(variant, chosen, measured, unit, config.minimum_gain),
        )
        for variant, of in measured.items()
    ]


def _measure(variant: ModelVariant, goal: Goal) -> _Measured:
    latency = latency_at(variant, goal.batch_rows)
    figures = {
        "latency": latency.p50_ms if latency else None,
        "throughput": variant.throughput.rows_per_s.value if variant.throughput else None,
        "cost": variant.price.per_million if variant.price else None,
    }
    figure = figures[goal.best]
    if not variant.accepted:
        return _Measured(figure, "it was dropped")
    if figure is None or latency is None:
        return _Measured(figure, "it was not measured")
    if goal.best == "latency" and latency.ratio_to_eager >= 1:
        return _Measured(figure, f"PyTorch eager is faster at batch {latency.batch_rows}")
    if goal.p95_ms is not None and latency.p95_ms > goal.p95_ms:
        return _Measured(
            figure,
            f"95 % of calls of {latency.batch_rows} rows take up to {latency.p95_ms:.3g} ms, "
            f"allowed are {goal.p95_ms:g} ms",
        )
    change = variant.quality_change
    if goal.quality_drop is not None and (change is None or change.low < -goal.quality_drop):
        lost = "is not known" if change is None else f"may change by {change.low:+.5f}"
        return _Measured(
            figure, f"{variant.quality_name} {lost}, this goal allows -{goal.quality_drop:.5f}"
        )
    return _Measured(figure)


def latency_at(variant: ModelVariant, batch_rows: int) -> VariantLatency | None:
    """At the largest measured batch size that is not above `batch_rows`, or at the smallest one."""
    by_size = sorted(variant.latencies, key=lambda at: at.batch_rows)
    below = [at for at in by_size if at.batch_rows <= batch_rows]
    return below[-1] if below else by_size[0] if by_size else None


def _chosen(measured: Mapping[str, _Measured], goal: Goal, minimum_gain: float) -> str | None:
    """The simplest variant without an objection within `minimum_gain` of the best figure."""
    efforts = {
        name: 1 / of.figure if goal.best == "throughput" else of.figure
        for name, of in measured.items()
        if of.figure is not None and of.objection is None
    }
    if not efforts:
        return None
    mark = min(efforts.values()) * minimum_gain
    return next(name for name, effort in efforts.items() if effort <= mark)


def _reason(
    name: str,
    chosen: str | None,
    measured: Mapping[str, _Measured],
    unit: str,
    minimum_gain: float,
) -> str:
    own = f"{_digits(measured[name].figure)} {unit}"
    if name != chosen:
        assert chosen is not None
        return f"{own}, {chosen} {_digits(measured[chosen].figure)} {unit}"
    others = [
        f"{other} {_digits(of.figure)}"
        for other, of in measured.items()
        if other != name and of.objection is None
    ]
    if not others:
        return f"{own}; no other accepted variant meets the goal"
    return f"{own}; {', '.join(others)}. The simplest within {minimum_gain:g} times of the best"


def _digits(figure: float | None) -> str:
    """Three digits that count, without powers of ten."""
    return "nothing" if figure is None else f"{float(f'{figure:.3g}'):,.10g}"


def _rule(goal: Goal, config: ConversionConfig) -> str:
    rule = {
        "latency": f"Least median latency of calls of {goal.batch_rows} rows",
        "throughput": f"Most rows a second of all cores, in calls of {THROUGHPUT_ROWS} rows",
        "cost": f"Least price, at {config.price_per_core_hour:g} {config.currency} for an hour of "
        "a core (of a GPU where it is one)",
    }[goal.best]
    if goal.p95_ms is not None:
        rule += f", 95 % of calls of {goal.batch_rows} rows within {goal.p95_ms:g} ms"
    if goal.quality_drop is not None:
        rule += f", losing at most {goal.quality_drop:g} of the task metric"
    return f"{rule}; the simplest of those within {config.minimum_gain:g} times of the best."
