"""Paired latency comparison: a variant has to be faster than the fastest simpler one, for certain.

From simple to complex, the median of the ratios within paired rounds has to be above the wanted
gain with 95 % confidence, at one batch size at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.contracts.conversion import OperatorProfile, VariantLatency, VariantThroughput
from tasks.contracts.data import AUC_NAME, R2_NAME
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.gates.examination import Examined
from tasks.conversion.gates.footprint import Footprint
from tasks.conversion.gates.timing import Timing
from tasks.conversion.kinds.interface import Wording

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
