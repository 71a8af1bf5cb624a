"""Which variants are accepted, and which one serves each goal on the measured hardware.

A variant has to be faster than the fastest simpler one, for certain: from simple to complex, the
median of the ratios within paired rounds has to be above the wanted gain with 95 % confidence, at
one batch size at least.

For a goal, the best figure of the accepted variants sets the mark. Of those that reach it within
`minimum_gain` the simplest is chosen: what is more complex has to be worth it. Anyone can repeat
the choice from the variants' records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.contracts.conversion import GoalResult, VariantLatency, VariantPrice, VariantThroughput
from tasks.contracts.data import AUC_NAME, R2_NAME
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import ModelVariant
from tasks.conversion.config import ConversionConfig
from tasks.conversion.examine import Examined
from tasks.conversion.kinds.interface import JudgedRows
from tasks.conversion.measure import MILLION, Timing
from tasks.conversion.targets.interface import ConversionJob

EAGER = "PyTorch eager"


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured of the variants that passed, by name."""

    timings: Mapping[int, Mapping[str, Timing]]
    """By batch size; PyTorch eager is among the names."""
    throughputs: Mapping[str, VariantThroughput]


def decide(
    job: ConversionJob, examined: list[Examined], measured: Measurements, judged: JudgedRows
) -> tuple[ModelVariant, ...]:
    """Accept or drop the examined variants, from simple to complex.

    Args:
        job: the source of all variants, batch sizes, and the gain that a variant has to reach.
        examined: the variants in order; a failure drops one, else it has to be faster.
        measured: of PyTorch eager and all variants without a failure.
        judged: name the metric and the unit of the gaps.
    """
    config, simpler, variants = job.config, [EAGER], list[ModelVariant]()
    for one in examined:
        compared: list[LatencyComparison] = []
        reason = f"Dropped: {one.failure}."
        if one.failure is None:
            compared = [
                compare_latency(one.built.name, simpler, rows, measured.timings[rows], config)
                for rows in config.batch_sizes
            ]
            reason = f"{decision(compared, config.minimum_gain)} {_agreement(one, judged)}"
        throughput = measured.throughputs.get(one.built.name)
        variants.append(_variant(job, one, judged.metric, throughput, compared, reason))
        if variants[-1].accepted:
            simpler.append(one.built.name)
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
    config: ConversionConfig,
) -> LatencyComparison:
    """Compare one variant with the fastest of the simpler ones at one batch size.

    Args:
        name: the variant.
        simpler: PyTorch eager and the simpler variants that were accepted.
        batch_rows: rows a call.
        timings: of all of them, from the same rounds.
        config: the lower end of the speed ratio's interval has to reach its `minimum_gain`.
    """
    own, eager = timings[name], timings[EAGER]
    fastest = min(simpler, key=lambda other: float(np.median(timings[other].rounds_ms)))
    gain = own.times_faster_than(timings[fastest])
    replaced = None if fastest == EAGER else timings[fastest].times_faster_than(own).value
    latency = VariantLatency(
        batch_rows=batch_rows,
        p50_ms=own.p50_ms,
        p95_ms=own.p95_ms,
        ratio_to_eager=eager.times_faster_than(own).value,
        ratio_to_replaced=replaced,
        cpu_ms=own.cpu_ms,
        cpu_ratio_to_eager=float(np.median(own.cpu_rounds_ms / eager.cpu_rounds_ms)),
    )
    return LatencyComparison(latency, fastest, gain, is_faster=gain.low >= config.minimum_gain)


def decision(compared: Sequence[LatencyComparison], minimum_gain: float) -> str:
    """Accepted or dropped, with the measured speed at every batch size."""
    faster = [str(one.latency.batch_rows) for one in compared if one.is_faster]
    figures = "; ".join(str(one) for one in compared)
    opening = f"Dropped: at no batch size {minimum_gain:.2f} times as fast as simpler variants"
    if faster:
        opening = f"Accepted for batches of {', '.join(faster)}"
    return (
        f"{opening}. Speed as a multiple of the fastest simpler variant, 95 % interval: {figures}."
    )


def _agreement(one: Examined, judged: JudgedRows) -> str:
    assert one.gaps is not None
    assert one.change is not None
    rows = one.gaps["test"]
    return (
        f"Answers differ from PyTorch by at most {rows.largest:.2g}{judged.unit} and on average "
        f"{rows.mean:.2g} on {rows.num_rows} test rows, {judged.metric} by {one.change.value:+.2g}."
    )


def _variant(
    job: ConversionJob,
    one: Examined,
    metric: str,
    throughput: VariantThroughput | None,
    compared: Sequence[LatencyComparison],
    reason: str,
) -> ModelVariant:
    built, model, gaps = one.built, one.model, one.gaps
    fields = {AUC_NAME: "auc_change", R2_NAME: "r2_change"}
    change: dict[str, Any] = {fields.get(metric, "metric_change"): one.change}
    as_built = {name: value for name, value in built if name not in ("failure", "settings")}
    return ModelVariant(
        hardware_class=job.config.hardware_class,
        source_sha256=job.program.program.sha256,
        parity_max=max(gaps["test"].largest, gaps["edge"].largest) if gaps else None,
        parity_mean=gaps["test"].mean if gaps else None,
        metric="" if metric in fields else metric,
        latencies=tuple(one.latency for one in compared),
        throughput=throughput,
        num_bytes=built.files.num_bytes if built.files else 0,
        load_ms=model.load_ms if model else None,
        accepted=any(one.is_faster for one in compared),
        reason=reason,
        settings={**built.settings, **(model.settings if model else {})},
        **as_built,
        **change,
    )


THROUGHPUT_ROWS = 32
"""Rows of a call when all cores ask at once: a call that a dynamic batch of a server makes."""
CURRENCY = "USD"


@dataclass(frozen=True)
class Goal:
    """What a variant is to be best at: least of the figure, or most."""

    rule: str
    unit: str
    figure: Callable[[ModelVariant], float | None]
    """None where it was not measured."""
    least: bool = True


GOALS = {
    "one-row": Goal(
        "Least median latency of calls of the fewest rows",
        "ms",
        lambda of: at.p50_ms if (at := _one_row(of)) else None,
    ),
    "bulk": Goal(
        f"Most rows a second of all cores, in calls of {THROUGHPUT_ROWS} rows",
        "rows/s",
        lambda of: of.throughput.rows_per_s.value if of.throughput else None,
        least=False,
    ),
    "price": Goal(
        "Least price of the time of a core (of a GPU where it is one)",
        f"{CURRENCY} per million rows",
        lambda of: of.price.per_million if of.price else None,
    ),
}


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
        per_million=seconds / 3600.0 * config.price_per_core_hour,
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
    figures = {v.name: goal.figure(v) for v in variants}
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
