"""Which converted forms of a model are worth having, and why the others are not.

From simple to complex, each form has to prove that it answers like PyTorch, keeps the task metric,
and is measured faster than the fastest simpler form at one batch size at least.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.data import AUC_NAME, R2_NAME, DataSplits, TaskKind, ValidatedDataset
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram, VariantLatency
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.latency import Timing, time_interleaved
from tasks.conversion.parity import (
    EDGE_BATCH_SIZES,
    SCORES_TOLD,
    ScoreGap,
    edge_gap,
    parity_failure,
    score_gap,
    score_rows,
)
from tasks.conversion.rows import LabelledRows, ModelInputs, edge_rows, read_rows
from tasks.conversion.runtimes import LoadedModel, load, torch_threads_restored
from tasks.conversion.task_metric import PairedQuality, paired_quality
from tasks.conversion.variants import FORMS
from tasks.errors import ConfigurationError, ConversionError
from tasks.settings import ArtifactStore

logger = logging.getLogger(__name__)
EAGER = "PyTorch eager"
METRIC_NAMES: dict[TaskKind, str] = {"classification": AUC_NAME, "regression": R2_NAME}


@dataclass(frozen=True)
class Examined:
    """One built form after it was loaded and compared with PyTorch; not yet timed."""

    built: BuiltVariant
    failure: str | None
    model: LoadedModel | None = None
    rows: ScoreGap | None = None
    edges: ScoreGap | None = None
    change: Metric | None = None
    """Of the task metric."""


@dataclass(frozen=True)
class Reference:
    """The PyTorch program, and everything the forms are compared on."""

    model: LoadedModel
    rows: LabelledRows
    scores: NDArray[np.float32]
    edges: ModelInputs
    quality: PairedQuality
    unit: float
    """What a gap between scores of 1 is: 1, or a standard deviation of the label."""


def judge_variants(
    program: RegisteredProgram,
    built: tuple[BuiltVariant, ...],
    dataset: ValidatedDataset,
    splits: DataSplits,
    config: ConversionConfig,
    store: ArtifactStore,
) -> tuple[ModelVariant, ...]:
    """Compare, measure and keep or drop every target.

    Args:
        program: the source of all forms.
        built: forms as they were built, failed ones included, in any order.
        dataset: validated rows; the test window's are scored.
        splits: `test` is the window.
        config: targets, bounds, timing.
        store: holds all files.

    Returns:
        One variant a target, from simple to complex; dropped ones too, with the reason.

    Raises:
        ConfigurationError: a target is not among `built`.
        ArtifactError: the program, the rows or a built form is absent or damaged.
        DataContractError: the test window has no rows or labels that are all equal, or other
            columns.
        ConversionError: the program itself does not load.
    """
    targets = _targets(built, config)
    with torch_threads_restored():
        reference = _reference(program, dataset, splits, config, store)
        examined = [_examine(one, reference, config, store) for one in targets]
        timings = _time_all(reference, examined, config)
    variants = decide(program, examined, timings, config)
    for variant in variants:
        logger.info("%s: %s", variant.name, variant.reason)
    return variants


def _targets(built: tuple[BuiltVariant, ...], config: ConversionConfig) -> list[BuiltVariant]:
    """The built forms that are targets, from simple to complex."""
    by_name = {one.name: one for one in built}
    absent = [name for name in config.targets if name not in by_name]
    if absent:
        raise ConfigurationError(
            f"targets {', '.join(absent)} were not handed to the judge, only "
            f"{', '.join(by_name) or 'nothing'}; build every target first, failed ones count"
        )
    return [by_name[form.name] for form in FORMS if form.name in config.targets]


def _reference(
    program: RegisteredProgram,
    dataset: ValidatedDataset,
    splits: DataSplits,
    config: ConversionConfig,
    store: ArtifactStore,
) -> Reference:
    rows = read_rows(dataset, program.columns, splits.test, store)
    model = load(store.path(program.program), "pytorch", program.columns, config.threads)
    return Reference(
        model=model,
        rows=rows,
        scores=score_rows(model, rows.inputs),
        edges=edge_rows(rows.inputs, max(EDGE_BATCH_SIZES), config.seed),
        quality=paired_quality(program.columns.task, rows, config.auc_replicates, config.seed),
        unit=float(rows.labels.std()) if program.columns.task == "regression" else 1.0,
    )


def _examine(
    built: BuiltVariant, reference: Reference, config: ConversionConfig, store: ArtifactStore
) -> Examined:
    """Load one form and compare it with PyTorch; what fails is a finding, not an error."""
    if built.files is None:
        return Examined(built, failure=f"not built: {built.failure}")
    columns = reference.model.columns
    try:
        model = load(store.path(built.files), built.format, columns, config.threads)
        scores = score_rows(model, reference.rows.inputs)
        rows = score_gap(reference.scores, scores, reference.unit)
        edges = edge_gap(reference.model, model, reference.edges, reference.unit)
    except ConversionError as exc:
        return Examined(built, failure=str(exc))
    change = reference.quality.change(reference.scores, scores)
    bound = config.bound(built.precision)
    failure = parity_failure(rows, edges, bound, columns.task) or quality_failure(
        change, bound, METRIC_NAMES[columns.task]
    )
    return Examined(built, failure, model, rows, edges, change)


def quality_failure(change: Metric, bound: QualityBound, name: str = AUC_NAME) -> str | None:
    """Why a change of the task metric is beyond the bound, as a sentence; None where within."""
    if change.low >= -bound.auc_drop:
        return None
    return (
        f"{name} changes by {change.value:+.5f} ({change.low:+.5f} to {change.high:+.5f}) on the "
        f"test rows, it may lose {bound.auc_drop:.5f}"
    )


def _time_all(
    reference: Reference, examined: list[Examined], config: ConversionConfig
) -> dict[int, dict[str, Timing]]:
    """Time PyTorch eager and every form that passed, at every batch size, beside each other."""
    models = {EAGER: reference.model}
    models |= {e.built.name: e.model for e in examined if e.model is not None and not e.failure}
    if len(models) == 1:
        return {}
    timings = {}
    for batch_rows in config.batch_sizes:
        batch = reference.rows.inputs.repeated(batch_rows)
        calls = {n: partial(m, batch.categorical, batch.numeric) for n, m in models.items()}
        timings[batch_rows] = time_interleaved(calls, config.timing_rounds, config.round_ms)
    return timings


def decide(
    program: RegisteredProgram,
    examined: list[Examined],
    timings: Mapping[int, Mapping[str, Timing]],
    config: ConversionConfig,
) -> tuple[ModelVariant, ...]:
    """Keep or drop the examined forms, from simple to complex.

    Args:
        program: the source of all forms.
        examined: the forms in order; a failure drops one, else it has to win a race.
        timings: by batch size and name, for PyTorch eager and all forms without a failure.
        config: batch sizes and the gain that a form has to reach.
    """
    simpler = [EAGER]
    variants = []
    for one in examined:
        if one.failure is not None:
            variants.append(_variant(program, one, config, (), False, f"Dropped: {one.failure}."))
            continue
        races = [
            run_race(one.built.name, simpler, rows, timings[rows], config.minimum_gain)
            for rows in config.batch_sizes
        ]
        kept = any(race.won for race in races)
        reason = f"{verdict(races, config.minimum_gain)} {_agreement(one, program.columns.task)}"
        latencies = tuple(race.latency for race in races)
        variants.append(_variant(program, one, config, latencies, kept, reason))
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


def _agreement(one: Examined, task: TaskKind) -> str:
    assert one.rows is not None
    assert one.change is not None
    _, scores, unit = SCORES_TOLD[task]
    return (
        f"{scores.capitalize()} differ from PyTorch by at most {one.rows.largest:.2g}{unit} and on "
        f"average {one.rows.mean:.2g} on {one.rows.num_rows} test rows, {METRIC_NAMES[task]} by "
        f"{one.change.value:+.2g}."
    )


def _variant(
    program: RegisteredProgram,
    one: Examined,
    config: ConversionConfig,
    latencies: tuple[VariantLatency, ...],
    kept: bool,
    reason: str,
) -> ModelVariant:
    built, model, rows, edges = one.built, one.model, one.rows, one.edges
    is_number = program.columns.task == "regression"
    return ModelVariant(
        name=built.name,
        format=built.format,
        precision=built.precision,
        hardware_class=config.hardware_class,
        files=built.files,
        source_sha256=program.program.sha256,
        parity_max=max(rows.largest, edges.largest) if rows and edges else None,
        parity_mean=rows.mean if rows else None,
        auc_change=None if is_number else one.change,
        r2_change=one.change if is_number else None,
        latencies=latencies,
        num_bytes=built.files.num_bytes if built.files else 0,
        load_ms=model.load_ms if model else None,
        kept=kept,
        reason=reason,
        settings={**built.settings, **(model.settings if model else {})},
    )


def best_variant(variants: tuple[ModelVariant, ...], batch_rows: int) -> ModelVariant | None:
    """The kept variant that answers calls of about `batch_rows` rows fastest.

    Taken at the largest measured batch size that is not above `batch_rows`, or at the smallest one.

    Returns:
        The variant; None where none is kept, or PyTorch eager is faster there.
    """
    timed = [(variant, _latency_at(variant, batch_rows)) for variant in variants if variant.kept]
    faster = [(variant, at) for variant, at in timed if at.ratio_to_eager < 1]
    return min(faster, key=lambda pair: pair[1].p50_ms)[0] if faster else None


def _latency_at(variant: ModelVariant, batch_rows: int) -> VariantLatency:
    by_size = sorted(variant.latencies, key=lambda at: at.batch_rows)
    below = [at for at in by_size if at.batch_rows <= batch_rows]
    return below[-1] if below else by_size[0]
