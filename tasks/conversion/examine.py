"""Examining one variant: does it answer like PyTorch, always, and keep the task metric.

Answers are compared row by row, and for each row alone: a variant whose answer depends on the other
rows of a call, on their number or on an earlier call may agree with its source on every row that it
was compared on, and be wrong in service. A failure is a finding about the variant; the others are
examined all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.conversion import ConversionRows
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.kinds.interface import JudgedRows, ModelKind, Wording, bound_of, kind_of
from tasks.conversion.targets.catalog import format_of
from tasks.conversion.targets.interface import (
    SEED,
    Batches,
    Distances,
    LoadedModel,
    Runtime,
    Scorer,
    Scores,
)
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.conversion.variants import load_variant
from tasks.kernel.errors import ArtifactError, ConversionError, ConversionParityError
from tasks.kernel.settings import ArtifactStore

MOST_BATCHES = 8
ROWS_OF_A_BATCH = 64
CALL_SIZES = (1, 1, 1, 1, 2, 5, 21, 32)
REPEATED = 1e-6  # room for runtimes that add in another order each time
COMPANY = 0.25  # of the bound of the gap: kernels differ by the number of rows, and round otherwise


@dataclass(frozen=True)
class ScoreGap:
    """Distance between two models' answers for the same rows, as their kind measures it."""

    largest: float
    mean: float
    num_rows: int


def score_gap(
    reference: Scores, converted: Scores, distances: Distances, *, answered: bool = False
) -> ScoreGap:
    """Largest and mean distance between two models' answers for the same rows.

    Args:
        reference: answers of the PyTorch program; the first axis counts the rows.
        converted: answers of the converted model, same rows in the same order.
        distances: of the model's kind, one figure a row.
        answered: leave out rows for which the program itself gives NaN or Inf: of rows that data
            rarely holds, no variant can be wrong there.

    Returns:
        Largest and mean distance; zeros where there are no rows.

    Raises:
        ConversionParityError: the shapes differ or a value is not finite.
    """
    if reference.shape != converted.shape:
        raise ConversionParityError(
            f"converted model returned shape {converted.shape}, expected {reference.shape} "
            "(rows first); was the batch axis exported as dynamic?"
        )
    if answered:
        finite = np.isfinite(reference).all(axis=tuple(range(1, reference.ndim)))
        reference, converted = reference[finite], converted[finite]
    for whose, scores in (("PyTorch program", reference), ("converted model", converted)):
        odd = int(np.count_nonzero(~np.isfinite(scores).all(axis=tuple(range(1, scores.ndim)))))
        if odd:
            raise ConversionParityError(
                f"the {whose} gives NaN or Inf for {odd} of {len(scores)} rows, so parity is "
                "undefined; expected an answer for every row, missing values included"
            )
    if not len(reference):
        return ScoreGap(largest=0.0, mean=0.0, num_rows=0)
    gaps = distances(reference, converted)
    return ScoreGap(largest=float(gaps.max()), mean=float(gaps.mean()), num_rows=len(gaps))


def score_batches(model: Scorer, batches: Batches) -> NDArray[np.float32]:
    """Answers for all rows of all batches, one call a batch.

    Raises:
        ConversionParityError: the model returns another number of answers than it got rows.
    """
    parts = []
    for batch in batches:
        scores = model(batch)
        if scores.ndim == 0 or len(scores) != batch.num_rows:
            raise ConversionParityError(
                f"the model returned shape {scores.shape} for {batch.num_rows} rows, expected "
                f"{batch.num_rows} of them first; was the batch axis exported as dynamic?"
            )
        parts.append(scores)
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = sorted({str(part.shape) for part in parts})
        raise ConversionParityError(
            f"the model returned shapes {', '.join(shapes)} in calls of several sizes, expected "
            "the same after the first axis"
        )
    return np.concatenate(parts)


def parity_failure(
    rows: ScoreGap, edges: ScoreGap, timed: ScoreGap, bound: QualityBound, wording: Wording
) -> str | None:
    """Why the gaps are beyond the bound; None where they are within.

    Args:
        rows: of the test rows.
        edges: of rows that data rarely holds.
        timed: of the calls whose latency is taken.
        bound: what is allowed.
        wording: of the model's kind.
    """
    unit = wording.unit
    for where, gap, allowed in (
        ("test", rows, bound.max_gap),
        ("edge", edges, bound.edge_gap or bound.max_gap),
        ("timed", timed, bound.max_gap),
    ):
        if gap.largest > allowed:
            return (
                f"{wording.one} differs by {gap.largest:.2g}{unit} from PyTorch on {gap.num_rows} "
                f"{where} rows, allowed are {allowed:.2g}"
            )
    if rows.mean > bound.mean_gap:
        return (
            f"{wording.many} differ by {rows.mean:.2g}{unit} from PyTorch on average over "
            f"{rows.num_rows} test rows, allowed are {bound.mean_gap:.2g}"
        )
    return None


def rearrange(batches: Batches) -> tuple[Batches, NDArray[np.int64]]:
    """Seeded rows of up to eight batches, spread over all, in another order and smaller calls.

    Returns:
        The calls, and the place of each of their rows among all judged rows.
    """
    rng = np.random.default_rng(SEED)
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    chosen = np.unique(np.linspace(0, len(batches) - 1, MOST_BATCHES).astype(np.int64))
    calls, places = [], []
    for number in chosen:
        batch = batches[number]
        index = rng.permutation(batch.num_rows)[:ROWS_OF_A_BATCH]
        places.append(starts[number] + index)
        calls += [batch.taken(p) for p in np.split(index, np.cumsum(CALL_SIZES)) if len(p)]
    return tuple(calls), np.concatenate(places)


def batch_invariance_failure(
    model: Scorer, judged: JudgedRows, scores: Scores, bound: QualityBound
) -> str | None:
    """Why the answers of a variant depend on more than their row; None where they do not.

    Args:
        model: the variant.
        judged: the rows.
        scores: what the variant answered for their batches.
        bound: rows in other company may differ by a quarter of it.

    Raises:
        ConversionParityError: the variant gives other shapes, or no finite answer.
    """
    wording, first = judged.wording, judged.batches[0]
    changed = _largest_change(scores[: first.num_rows], score_batches(model, (first,)))
    if changed > REPEATED:
        return (
            f"{wording.one} changes by {changed:.2g} when the same rows are asked for again, "
            "expected the same answer each time"
        )
    calls, places = rearrange(judged.batches)
    gap = score_gap(scores[places], score_batches(model, calls), judged.distances)
    most, mean = bound.max_gap * COMPANY, bound.mean_gap * COMPANY
    if gap.largest > most or gap.mean > mean:
        return (
            f"{wording.one} depends on the other rows of its call: in calls of "
            f"{min(CALL_SIZES)} to {max(CALL_SIZES)} rows in another order it differs by up to "
            f"{gap.largest:.2g}{wording.unit} and on average {gap.mean:.2g}, allowed are "
            f"{most:.2g} and {mean:.2g}"
        )
    return None


def _largest_change(once: Scores, again: Scores) -> float:
    """Of any number of any answer, in parts of the largest number where that is above 1."""
    if once.shape != again.shape:
        return float("inf")
    size = max(1.0, float(np.abs(once).max(initial=0)))
    return float(np.abs(once.astype(np.float64) - again).max(initial=0)) / size


@dataclass(frozen=True)
class Examined:
    """One variant after it was loaded and compared with PyTorch; not yet timed."""

    built: BuiltVariant
    failure: str | None
    model: LoadedModel | None = None
    rows: ScoreGap | None = None
    edges: ScoreGap | None = None
    change: Metric | None = None
    """Of the task metric."""


@dataclass(frozen=True)
class Reference:
    """The PyTorch program, its answers, and everything the variants are compared on."""

    program: RegisteredProgram
    model: LoadedModel
    kind: ModelKind
    judged: JudgedRows
    timed: Batches
    """Calls of the sizes at which latency is taken: what is fast there has to be right there."""
    scores: Scores
    edge_scores: Scores
    timed_scores: Scores


def take_reference(
    program: RegisteredProgram, rows: ConversionRows, config: ConversionConfig, store: ArtifactStore
) -> Reference:
    """Load the program and answer all rows with it.

    Raises:
        ArtifactError: program or rows are absent or damaged.
        DataContractError: the rows cannot judge.
        ConversionError: the program does not load.
    """
    kind = kind_of(program)
    judged = kind.read_judged(program, rows, config, store)
    timed = tuple(judged.timing_batch(size) for size in config.batch_sizes)
    model = load_pytorch(store.path(program.program), program.signature, Runtime(config.threads))
    scores = score_batches(model, judged.batches)
    if judged.distances_of is not None:
        judged = replace(judged, distances=judged.distances_of(scores))
    edge_scores, timed_scores = (score_batches(model, calls) for calls in (judged.edges, timed))
    return Reference(program, model, kind, judged, timed, scores, edge_scores, timed_scores)


def examine(
    built: BuiltVariant, reference: Reference, config: ConversionConfig, store: ArtifactStore
) -> Examined:
    """Load one variant and compare it with PyTorch."""
    if built.files is None:
        return Examined(built, failure=f"not built: {built.failure}")
    made = format_of(built.name)
    if not made.is_for(config.hardware_class):
        return Examined(
            built,
            failure=f"it is for {' and '.join(made.hardware)}, and this is {config.hardware_class}"
            ": convert on such a machine to judge it",
        )
    try:
        runtime = Runtime(config.threads, config.hardware_class)
        load_variant(built, reference.program, runtime, store)  # brings the library in, untimed
        model = load_variant(built, reference.program, runtime, store)
        return _compare(built, model, reference, config)
    except (ConversionError, ArtifactError) as exc:
        return Examined(built, failure=str(exc))


def _compare(
    built: BuiltVariant, model: LoadedModel, reference: Reference, config: ConversionConfig
) -> Examined:
    judged, bound = reference.judged, bound_of(reference.kind, built.precision, config)
    distances = judged.distances
    scores = score_batches(model, judged.batches)
    if (dtype := str(scores.dtype)) != (promised := model.signature.output.dtype):
        return Examined(built, f"it answers with {dtype}, its signature promises {promised}")
    rows = score_gap(reference.scores, scores, distances)
    edge_scores = score_batches(model, judged.edges)
    edges = score_gap(reference.edge_scores, edge_scores, distances, answered=True)
    timed = score_gap(reference.timed_scores, score_batches(model, reference.timed), distances)
    change = judged.change(reference.scores, scores)
    failure = (
        parity_failure(rows, edges, timed, bound, judged.wording)
        or batch_invariance_failure(model, judged, scores, bound)
        or quality_failure(change, bound, judged.wording.metric)
    )
    return Examined(built, failure, model, rows, edges, change)


def quality_failure(change: Metric, bound: QualityBound, name: str) -> str | None:
    """Why a change of the task metric is beyond the bound; None where it is within."""
    if change.low >= -bound.quality_drop:
        return None
    return (
        f"{name} changes by {change.value:+.5f} ({change.low:+.5f} to {change.high:+.5f}) on the "
        f"test rows, it may lose {bound.quality_drop:.5f}"
    )
