"""Does a converted model answer like the program it was made from, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.conversion.config import QualityBound
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.kinds.interface import Batches, FloatArray, Scores, Wording
from tasks.kernel.errors import ConversionParityError

Scorer = Callable[[ModelInputs], NDArray[np.float32]]


@dataclass(frozen=True)
class ScoreGap:
    """Distance between two models' answers for the same rows, as their family measures it."""

    largest: float
    mean: float
    num_rows: int


def score_gap(
    reference: Scores, converted: Scores, distances: Callable[[Scores, Scores], FloatArray]
) -> ScoreGap:
    """Largest and mean distance between two models' answers for the same rows.

    Args:
        reference: answers of the PyTorch program; the first axis counts the rows.
        converted: answers of the converted model, same rows in the same order.
        distances: of the family, one figure a row.

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


def answered_gap(
    reference: Scores, converted: Scores, distances: Callable[[Scores, Scores], FloatArray]
) -> ScoreGap:
    """`score_gap` of the rows for which the PyTorch program has an answer.

    Of rows that data rarely holds: where the source itself gives NaN or Inf, no form can be wrong.

    Raises:
        ConversionParityError: the shapes differ, or a form has no answer where its source has one.
    """
    if reference.shape != converted.shape:
        return score_gap(reference, converted, distances)
    answered = np.isfinite(reference).all(axis=tuple(range(1, reference.ndim)))
    return score_gap(reference[answered], converted[answered], distances)


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
    """Why the gaps are beyond the bound, as a sentence; None where they are within.

    Args:
        rows: of the test rows.
        edges: of rows that data rarely holds.
        timed: of the calls whose latency is taken.
        bound: what is allowed.
        wording: of the family.
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
