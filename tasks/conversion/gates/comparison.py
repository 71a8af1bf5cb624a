"""Races between forms that passed: each has to be faster than the fastest simpler one, for certain.

From simple to complex, the median of the ratios within paired rounds has to be above the wanted
gain with 95 % confidence, at one batch size at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.contracts.data import AUC_NAME, R2_NAME
from tasks.contracts.evaluation import Metric
from tasks.contracts.measurement import OperatorProfile, VariantLatency, VariantThroughput
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.gates.examination import Examined
from tasks.conversion.gates.footprint import Footprint
from tasks.conversion.gates.latency import Timing
from tasks.conversion.kinds.interface import Wording

EAGER = "PyTorch eager"


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured of the forms that passed, by name."""

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
    """Keep or drop the examined forms, from simple to complex.

    Args:
        program: the source of all forms.
        examined: the forms in order; a failure drops one, else it has to win a race.
        measured: of PyTorch eager and all forms without a failure.
        config: batch sizes and the gain that a form has to reach.
        wording: of the program's family.
    """
    simpler = [EAGER]
    variants = []
    for one in examined:
        if one.failure is not None:
            reason = f"Dropped: {one.failure}."
            variants.append(_variant(program, one, config, wording, NOTHING, (), reason))
            continue
        races = [
            run_race(one.built.name, simpler, rows, measured.timings[rows], config.minimum_gain)
            for rows in config.batch_sizes
        ]
        kept = any(race.won for race in races)
        reason = f"{verdict(races, config.minimum_gain)} {_agreement(one, wording)}"
        variants.append(_variant(program, one, config, wording, measured, races, reason))
        if kept:
            simpler.append(one.built.name)
    return tuple(variants)


@dataclass(frozen=True)
class Race:
    """One form against the fastest simpler one, at one batch size."""

    latency: VariantLatency
    rival: str
    gain: Metric
    won: bool

    def __str__(self) -> str:
        return (
            f"batch {self.latency.batch_rows}: {self.gain.value:.2f} x {self.rival} "
            f"({self.gain.low:.2f} to {self.gain.high:.2f})"
        )


def run_race(
    name: str,
    simpler: list[str],
    batch_rows: int,
    timings: Mapping[str, Timing],
    minimum_gain: float,
) -> Race:
    """Set one form against the fastest of the simpler ones at one batch size.

    Args:
        name: the form.
        simpler: PyTorch eager and the simpler forms that were kept.
        batch_rows: rows a call.
        timings: of all of them, from the same rounds.
        minimum_gain: the lower end of the speed ratio's interval has to reach this.
    """
    own, eager = timings[name], timings[EAGER]
    rival = min(simpler, key=lambda other: float(np.median(timings[other].rounds_ms)))
    gain = own.times_faster_than(timings[rival])
    latency = VariantLatency(
        batch_rows=batch_rows,
        p50_ms=own.p50_ms,
        p95_ms=own.p95_ms,
        ratio_to_eager=eager.times_faster_than(own).value,
        ratio_to_replaced=None if rival == EAGER else timings[rival].times_faster_than(own).value,
        cpu_ms=own.cpu_ms,
        cpu_ratio_to_eager=own.cpu_ratio_to(eager),
    )
    return Race(latency=latency, rival=rival, gain=gain, won=gain.low >= minimum_gain)


def verdict(races: list[Race], minimum_gain: float) -> str:
    """Kept or dropped, with the measured speed at every batch size, as a sentence."""
    won = [str(race.latency.batch_rows) for race in races if race.won]
    figures = "; ".join(str(race) for race in races)
    if won:
        opening = f"Kept for batches of {_listed(won)}"
    else:
        opening = f"Dropped: at no batch size {minimum_gain:.2f} times as fast as simpler forms"
    return f"{opening}. Speed as a multiple of the fastest simpler form, 95 % interval: {figures}."


def _listed(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


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
    races: Sequence[Race],
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
        latencies=tuple(race.latency for race in races),
        throughput=measured.throughputs.get(built.name),
        num_bytes=built.files.num_bytes if built.files else 0,
        memory_bytes=footprint.memory_bytes if footprint else None,
        load_ms=model.load_ms if model else None,
        profile=measured.profiles.get(built.name),
        source_profile=measured.profiles.get(EAGER),
        kept=any(race.won for race in races),
        reason=reason,
        settings={**built.settings, **(model.settings if model else {})},
        stamp=built.stamp,
    )
