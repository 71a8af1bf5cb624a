"""Does a form answer for a row alone: whatever comes with it, in whatever order, and each time.

A form whose answer depends on the other rows of a call, on their number or on an earlier call may
agree with its source on every row that it was compared on, and be wrong in service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.conversion.config import QualityBound
from tasks.conversion.gates.parity import Scorer, score_batches, score_gap
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.kinds.interface import Batches, FloatArray, Scores, Wording

MOST_BATCHES = 8
ROWS_OF_A_BATCH = 64
CALL_SIZES = (1, 1, 1, 1, 2, 5, 21, 32)
REPEATED = 1e-6  # room for runtimes that add in another order each time
COMPANY = 0.25  # of the bound of the gap: kernels differ by the number of rows, and round otherwise


@dataclass(frozen=True)
class Rearranged:
    """Some rows of the judged batches, in other calls."""

    calls: Batches
    places: NDArray[np.int64]
    """Of each row among all judged rows."""


def rearrange(batches: Batches, seed: int) -> Rearranged:
    """Seeded rows of up to eight batches, spread over all, in another order and smaller calls."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    chosen = np.unique(np.linspace(0, len(batches) - 1, MOST_BATCHES).astype(np.int64))
    calls, places = [], []
    for number in chosen:
        batch = batches[number]
        index = rng.permutation(batch.num_rows)[:ROWS_OF_A_BATCH]
        places.append(starts[number] + index)
        calls += _in_calls(batch, index)
    return Rearranged(tuple(calls), np.concatenate(places))


def _in_calls(batch: ModelInputs, index: NDArray[np.int64]) -> list[ModelInputs]:
    ends = np.cumsum(CALL_SIZES)
    return [batch.taken(part) for part in np.split(index, ends) if len(part)]


def steadiness_failure(
    model: Scorer,
    batches: Batches,
    scores: Scores,
    distances: Callable[[Scores, Scores], FloatArray],
    bound: QualityBound,
    wording: Wording,
    seed: int,
) -> str | None:
    """Why the answers of a form depend on more than their row, as a sentence; None where not.

    Args:
        model: the form.
        batches: the judged rows.
        scores: what the form answered for them.
        distances: of the family.
        bound: rows in other company may differ by a quarter of it.
        wording: of the family.
        seed: of the choice of rows.

    Raises:
        ConversionParityError: the form gives other shapes, or no finite answer.
    """
    first = batches[0]
    changed = _largest_change(scores[: first.num_rows], score_batches(model, (first,)))
    if changed > REPEATED:
        return (
            f"{wording.one} changes by {changed:.2g} when the same rows are asked for again, "
            "expected the same answer each time"
        )
    other = rearrange(batches, seed)
    gap = score_gap(scores[other.places], score_batches(model, other.calls), distances)
    most, mean = bound.max_gap * COMPANY, bound.mean_gap * COMPANY
    if gap.largest > most or gap.mean > mean:
        return (
            f"{wording.one} depends on the other rows of its call: in calls of "
            f"{min(CALL_SIZES)} to {max(CALL_SIZES)} rows in another order it differs by up to "
            f"{gap.largest:.2g}{wording.unit} and on average {gap.mean:.2g} from the same form's "
            f"own answer, allowed are {most:.2g} and {mean:.2g}"
        )
    return None


def _largest_change(once: Scores, again: Scores) -> float:
    """Of any number of any answer, in parts of the largest number where that is above 1."""
    if once.shape != again.shape:
        return float("inf")
    size = max(1.0, float(np.abs(once).max(initial=0)))
    return float(np.abs(once.astype(np.float64) - again).max(initial=0)) / size
