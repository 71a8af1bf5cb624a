"""Which variants are accepted, and which one serves each goal on the measured hardware.

A variant has to be faster than the fastest simpler one, for certain: from simple to complex, the
median of the ratios within paired rounds has to be above the wanted gain with 95 % confidence, at
one batch size at least.

For a goal, the best figure of the accepted variants that meet its bounds sets the mark. Of those
that reach it within `minimum_gain` the simplest is chosen: what is more complex has to be worth it.
Anyone can repeat the choice from the variants' records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.contracts.conversion import (
    GoalStanding,
    OperatorProfile,
    VariantLatency,
    VariantPrice,
    VariantThroughput,
)
from tasks.contracts.data import AUC_NAME, R2_NAME
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig, Goal
from tasks.conversion.examine import Examined
from tasks.conversion.kinds.interface import Wording
from tasks.conversion.measure import MILLION, Footprint, Timing

EAGER = "PyTorch eager"


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured of the variants that passed, by name."""

    timings: Mapping[int, Mapping[str, Timing]]
    """By batch size; PyTorch eager is among the names."""
    throughputs: Mapping[str, VariantThroughput]
    footprints: Mapping[str, Footprint]
    profiles: Mapping[str, OperatorProfile]
    """PyTorch eager is among the names."""


NOTHING = Measurements({}, {}, {}, {})


def decide(
    program: RegisteredProgram,
    examined: list[Examined],
    measured: Measurements,
    config: ConversionConfig,
    wording: Wording,
) -> tuple[ModelVariant, ...]:
    """Accept or drop the examined variants, from simple to complex.

    Args:
        program: the source of all variants.
        examined: the variants in order; a failure drops one, else it has to be faster.
        measured: of PyTorch eager and all variants without a failure.
        config: batch sizes and the gain that a variant has to reach.
        wording: of the model's kind.
    """
    simpler = [EAGER]
    variants = []
    for one in examined:
        if one.failure is not None:
            reason = f"Dropped: {one.failure}."
            variants.append(_variant(program, one, config, wording, NOTHING, (), reason))
            continue
        name, gain = one.built.name, config.minimum_gain
        compared = [
            compare_latency(name, simpler, rows, measured.timings[rows], gain)
            for rows in config.batch_sizes
        ]
        reason = f"{decision(compared, gain)} {_agreement(one, wording)}"
        variants.append(_variant(program, one, config, wording, measured, compared, reason))
        if variants[-1].accepted:
            simpler.append(name)
    return tuple(variants)


@dataclass(frozen=True)
class LatencyComparison:
    """One variant against the fastest simpler one, at one batch size."""

    latency: VariantLatency
    baseline: str
    gain: Metric
    is_faster: bool

    def __str__(self) -> str:
        return (
            f"batch {self.latency.batch_rows}: {self.gain.value:.2f} x {self.baseline} "
            f"({self.gain.low:.2f} to {self.gain.high:.2f})"
        )


def compare_latency(
    name: str,
    simpler: list[str],
    batch_rows: int,
    timings: Mapping[str, Timing],
    minimum_gain: float,
) -> LatencyComparison:
    """Compare one variant with the fastest of the simpler ones at one batch size.

    Args:
        name: the variant.
        simpler: PyTorch eager and the simpler variants that were accepted.
        batch_rows: rows a call.
        timings: of all of them, from the same rounds.
        minimum_gain: the lower end of the speed ratio's interval has to reach this.
    """
    own, eager = timings[name], timings[EAGER]
    fastest = min(simpler, key=lambda other: float(np.median(timings[other].rounds_ms)))
    gain = own.times_faster_than(timings[fastest])
    latency = VariantLatency(
        batch_rows=batch_rows,
        p50_ms=own.p50_ms,
        p95_ms=own.p95_ms,
        ratio_to_eager=eager.times_faster_than(own).value,
        ratio_to_replaced=None
        if fastest == EAGER
        else timings[fastest].times_faster_than(own).value,
        cpu_ms=own.cpu_ms,
        cpu_ratio_to_eager=own.cpu_ratio_to(eager),
    )
    return LatencyComparison(latency, fastest, gain, is_faster=gain.low >= minimum_gain)


def decision(compared: Sequence[LatencyComparison], minimum_gain: float) -> str:
    """Accepted or dropped, with the measured speed at every batch size."""
    faster = [str(one.latency.batch_rows) for one in compared if one.is_faster]
    figures = "; ".join(str(one) for one in compared)
    if faster:
        opening = f"Accepted for batches of {', '.join(faster)}"
    else:
        opening = f"Dropped: at no batch size {minimum_gain:.2f} times as fast as simpler variants"
    return (
        f"{opening}. Speed as a multiple of the fastest simpler variant, 95 % interval: {figures}."
    )


def _agreement(one: Examined, wording: Wording) -> str:
    assert one.rows is not None
    assert one.change is not None
    return (
        f"{wording.many.capitalize()} differ from PyTorch by at most {one.rows.largest:.2g}"
        f"{wording.unit} and on average {one.rows.mean:.2g} on {one.rows.num_rows} test rows, "
        f"{wording.metric} by {one.change.value:+.2g}."
    )


def _variant(
    program: RegisteredProgram,
    one: Examined,
    config: ConversionConfig,
    wording: Wording,
    measured: Measurements,
    compared: Sequence[LatencyComparison],
    reason: str,
) -> ModelVariant:
    built, model, rows, edges = one.built, one.model, one.rows, one.edges
    footprint = measured.footprints.get(built.name)
    return ModelVariant(
        name=built.name,
        format=built.format,
        precision=built.precision,
        hardware_class=config.hardware_class,
        files=built.files,
        source_sha256=program.program.sha256,
        parity_max=max(rows.largest, edges.largest) if rows and edges else None,
        parity_mean=rows.mean if rows else None,
        auc_change=one.change if wording.metric == AUC_NAME else None,
        r2_change=one.change if wording.metric == R2_NAME else None,
        metric="" if wording.metric in (AUC_NAME, R2_NAME) else wording.metric,
        metric_change=None if wording.metric in (AUC_NAME, R2_NAME) else one.change,
        latencies=tuple(one.latency for one in compared),
        throughput=measured.throughputs.get(built.name),
        num_bytes=built.files.num_bytes if built.files else 0,
        memory_bytes=footprint.memory_bytes if footprint else None,
        load_ms=model.load_ms if model else None,
        profile=measured.profiles.get(built.name),
        source_profile=measured.profiles.get(EAGER),
        accepted=any(one.is_faster for one in compared),
        reason=reason,
        settings={**built.settings, **(model.settings if model else {})},
        provenance=built.provenance,
    )


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
