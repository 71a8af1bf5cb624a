"""Which variants are accepted, and which one serves each goal on the measured hardware.

A variant has to be faster than the fastest simpler one, for certain: from simple to complex, the
median of the ratios within paired rounds has to be above the wanted gain with 95 % confidence, at
one batch size at least.

For a goal, the best figure of the accepted variants sets the mark. Of those that reach it within
`minimum_gain` the simplest is chosen: what is more complex has to be worth it. Anyone can repeat
the choice from the variants' records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.contracts.conversion import (
    GoalResult,
    VariantLatency,
    VariantPrice,
    VariantThroughput,
)
from tasks.contracts.data import AUC_NAME, R2_NAME
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.examine import Examined
from tasks.conversion.kinds.interface import Wording
from tasks.conversion.measure import MILLION, Timing

EAGER = "PyTorch eager"


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured of the variants that passed, by name."""

    timings: Mapping[int, Mapping[str, Timing]]
    """By batch size; PyTorch eager is among the names."""
    throughputs: Mapping[str, VariantThroughput]


NOTHING = Measurements({}, {})


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
        load_ms=model.load_ms if model else None,
        accepted=any(one.is_faster for one in compared),
        reason=reason,
        settings={**built.settings, **(model.settings if model else {})},
        provenance=built.provenance,
    )


SECONDS_AN_HOUR = 3600.0
THROUGHPUT_ROWS = 32
"""Rows of a call when all cores ask at once: a call that a dynamic batch of a server makes."""
CURRENCY = "USD"


@dataclass(frozen=True)
class Goal:
    """What a variant is to be best at: least of the figure, or most."""

    rule: str
    unit: str
    least: bool = True


GOALS = {
    "one-row": Goal("Least median latency of calls of the fewest rows", "ms"),
    "bulk": Goal(
        f"Most rows a second of all cores, in calls of {THROUGHPUT_ROWS} rows", "rows/s", False
    ),
    "price": Goal(
        "Least price of the time of a core (of a GPU where it is one)",
        f"{CURRENCY} per million rows",
    ),
}


def _figure(variant: ModelVariant, goal: str) -> float | None:
    """What is compared for a goal; None where it was not measured."""
    latency, throughput, price = _one_row(variant), variant.throughput, variant.price
    if goal == "one-row":
        return latency.p50_ms if latency else None
    if goal == "bulk":
        return throughput.rows_per_s.value if throughput else None
    return price.per_million if price else None


def choose(
    variants: tuple[ModelVariant, ...], config: ConversionConfig
) -> tuple[ModelVariant, ...]:
    """The same variants, each with its price and its standing for every goal.

    Args:
        variants: judged on one hardware class, from simple to complex.
        config: price, and how much better a more complex variant has to be.
    """
    variants = tuple(v.model_copy(update={"price": price_of(v, config)}) for v in variants)
    by_goal = [_for_goal(name, variants, config.minimum_gain) for name in GOALS]
    return tuple(
        variant.model_copy(update={"standings": standings})
        for variant, standings in zip(variants, zip(*by_goal, strict=True), strict=True)
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
        currency=CURRENCY,
    )


def _for_goal(
    name: str, variants: tuple[ModelVariant, ...], minimum_gain: float
) -> list[GoalResult]:
    """The standing of each variant for one goal.

    The best figure of those without an objection sets the mark; the simplest that reaches it within
    `minimum_gain` is chosen.
    """
    goal = GOALS[name]
    figures = {v.name: _figure(v, name) for v in variants}
    objections = {v.name: _objection(v, name, figures[v.name]) for v in variants}
    efforts = {
        of: figure if goal.least else 1 / figure
        for of, figure in figures.items()
        if figure is not None and objections[of] is None
    }
    mark = min(efforts.values(), default=0.0) * minimum_gain
    chosen = next((of for of, effort in efforts.items() if effort <= mark), None)
    compared = ", ".join(f"{of} {_digits(figures[of])} {goal.unit}" for of in efforts)
    return [
        GoalResult(
            goal=name,
            rule=f"{goal.rule}; the simplest of those within {minimum_gain:g} times of the best.",
            figure=figures[of],
            unit=goal.unit,
            chosen=of == chosen,
            reason=objection or compared,
        )
        for of, objection in objections.items()
    ]


def _objection(variant: ModelVariant, goal: str, figure: float | None) -> str | None:
    """Why a variant cannot serve a goal."""
    if not variant.accepted:
        return "it was dropped"
    latency = _one_row(variant)
    if figure is None or latency is None:
        return "it was not measured"
    if goal == "one-row" and latency.ratio_to_eager >= 1:
        return f"PyTorch eager is faster at batch {latency.batch_rows}"
    return None


def _one_row(variant: ModelVariant) -> VariantLatency | None:
    """At the smallest measured batch size."""
    return min(variant.latencies, key=lambda at: at.batch_rows, default=None)


def _digits(figure: float | None) -> str:
    """Three digits that count, without powers of ten."""
    return "nothing" if figure is None else f"{float(f'{figure:.3g}'):,.10g}"
