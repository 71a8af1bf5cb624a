"""Examining one variant: does it answer like PyTorch, always, and keep the task metric.

Answers are compared row by row, and for each row alone: a variant whose answer depends on the other
rows of a call, on their number or on an earlier call may agree with its source on every row that it
was compared on, and be wrong in service. A failure is a finding about the variant; the others are
examined all the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.evaluation import Metric
from tasks.contracts.release import BuiltVariant
from tasks.conversion.config import QualityBound
from tasks.conversion.kinds.interface import JudgedRows, bound_of, kind_of
from tasks.conversion.targets import interface
from tasks.conversion.targets.catalog import format_of
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.conversion.variants import load_variant
from tasks.kernel.errors import ArtifactError, ConversionError, ConversionParityError

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
    reference: interface.Scores,
    converted: interface.Scores,
    distances: interface.Distances,
    *,
    answered: bool = False,
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


def score_batches(model: interface.Scorer, batches: interface.Batches) -> NDArray[np.float32]:
    """Answers for all rows of all batches, one call a batch.

    Raises:
        ConversionParityError: the model returns another number of answers than it got rows.
    """
    answers = [model(batch) for batch in batches]
    for batch, scores in zip(batches, answers, strict=True):
        if scores.ndim == 0 or scores.shape != (batch.num_rows, *answers[0].shape[1:]):
            raise ConversionParityError(
                f"the model returned shape {scores.shape} for {batch.num_rows} rows, expected as "
                f"many rows first and {answers[0].shape[1:]} behind them in every call; was the "
                "batch axis exported as dynamic?"
            )
    return np.concatenate(answers)


def parity_failure(gaps: Mapping[str, ScoreGap], bound: QualityBound, unit: str) -> str | None:
    """Why the gaps are beyond the bound; None where they are within.

    Args:
        gaps: of `test` rows, of `edge` rows that data rarely holds, and of the `timed` calls.
        bound: what is allowed.
        unit: of a gap.
    """
    for where, gap in gaps.items():
        allowed = bound.max_gap if where != "edge" else bound.edge_gap or bound.max_gap
        if gap.largest > allowed:
            return (
                f"an answer differs by {gap.largest:.2g}{unit} from PyTorch on {gap.num_rows} "
                f"{where} rows, allowed are {allowed:.2g}"
            )
    rows = gaps["test"]
    if rows.mean > bound.mean_gap:
        return (
            f"answers differ by {rows.mean:.2g}{unit} from PyTorch on average over "
            f"{rows.num_rows} test rows, allowed are {bound.mean_gap:.2g}"
        )
    return None


def rearrange(batches: interface.Batches) -> tuple[interface.Batches, NDArray[np.int64]]:
    """Seeded rows of up to eight batches, spread over all, in another order and smaller calls.

    Returns:
        The calls, and the place of each of their rows among all judged rows.
    """
    rng = np.random.default_rng(interface.SEED)
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
    model: interface.Scorer, judged: JudgedRows, scores: interface.Scores, bound: QualityBound
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
    first = judged.batches[0]
    changed = _largest_change(scores[: first.num_rows], score_batches(model, (first,)))
    if changed > REPEATED:
        return (
            f"an answer changes by {changed:.2g} when the same rows are asked for again, expected "
            "the same answer each time"
        )
    calls, places = rearrange(judged.batches)
    gap = score_gap(scores[places], score_batches(model, calls), judged.distances)
    most, mean = bound.max_gap * COMPANY, bound.mean_gap * COMPANY
    if gap.largest > most or gap.mean > mean:
        return (
            f"an answer depends on the other rows of its call: in calls of {min(CALL_SIZES)} to "
            f"{max(CALL_SIZES)} rows in another order it differs by up to "
            f"{gap.largest:.2g}{judged.unit} and on average {gap.mean:.2g}, allowed are {most:.2g} "
            f"and {mean:.2g}"
        )
    return None


def _largest_change(once: interface.Scores, again: interface.Scores) -> float:
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
    model: interface.LoadedModel | None = None
    gaps: Mapping[str, ScoreGap] | None = None
    """Of `test`, `edge` and `timed` rows."""
    change: Metric | None = None
    """Of the task metric."""


@dataclass(frozen=True)
class Reference:
    """The PyTorch program, everything the variants are compared on, and its answers to that."""

    job: interface.ConversionJob
    model: interface.LoadedModel
    judged: JudgedRows
    calls: Mapping[str, interface.Batches]
    """`test` and `edge` rows, and those `timed`: what is fast there has to be right there."""
    scores: Mapping[str, interface.Scores]


def take_reference(job: interface.ConversionJob) -> Reference:
    """Load the program and answer all rows with it.

    Raises:
        ArtifactError: program or rows are absent or damaged.
        DataContractError: the rows cannot judge.
        ConversionError: the program does not load.
    """
    program, judged = job.program, kind_of(job.program).read_judged(job)
    timed = tuple(judged.timing_batch(size) for size in job.config.batch_sizes)
    path, runtime = job.store.path(program.program), interface.Runtime(job.config.threads)
    model = load_pytorch(path, program.signature, runtime)
    calls = {"test": judged.batches, "edge": judged.edges, "timed": timed}
    scores = {where: score_batches(model, batches) for where, batches in calls.items()}
    if judged.distances_of is not None:
        judged = replace(judged, distances=judged.distances_of(scores["test"]))
    return Reference(job, model, judged, calls, scores)


def examine(built: BuiltVariant, reference: Reference) -> Examined:
    """Load one variant and compare it with PyTorch."""
    job, config = reference.job, reference.job.config
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
        runtime = interface.Runtime(config.threads, config.hardware_class)
        load_variant(built, job.program, runtime, job.store)  # brings the library in, untimed
        model = load_variant(built, job.program, runtime, job.store)
        bound = bound_of(kind_of(job.program), built.precision, config)
        return _compare(built, model, reference, bound)
    except (ConversionError, ArtifactError) as exc:
        return Examined(built, failure=str(exc))


def _compare(
    built: BuiltVariant, model: interface.LoadedModel, reference: Reference, bound: QualityBound
) -> Examined:
    judged = reference.judged
    scores = {where: score_batches(model, batches) for where, batches in reference.calls.items()}
    if (dtype := str(scores["test"].dtype)) != (promised := model.signature.output.dtype):
        return Examined(built, f"it answers with {dtype}, its signature promises {promised}")
    gaps = {
        where: score_gap(expected, scores[where], judged.distances, answered=where == "edge")
        for where, expected in reference.scores.items()
    }
    change = judged.change(reference.scores["test"], scores["test"])
    failure = (
        parity_failure(gaps, bound, judged.unit)
        or batch_invariance_failure(model, judged, scores["test"], bound)
        or quality_failure(change, bound, judged.metric)
    )
    return Examined(built, failure, model, gaps, change)


def quality_failure(change: Metric, bound: QualityBound, name: str) -> str | None:
    """Why a change of the task metric is beyond the bound; None where it is within."""
    if change.low >= -bound.quality_drop:
        return None
    return f"{name} changes by {change:+.5f} on the test rows, it may lose {bound.quality_drop:.5f}"
