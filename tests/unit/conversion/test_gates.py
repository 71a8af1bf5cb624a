"""Parity, batch invariance, latency and throughput; no time is judged."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.conversion.config import QualityBound
from tasks.conversion.examine import (
    ScoreGap,
    batch_invariance_failure,
    parity_failure,
    score_batches,
    score_gap,
)
from tasks.conversion.kinds.tabular import edge_batches, score_distances
from tasks.conversion.measure import median_interval
from tasks.conversion.targets.interface import ModelInputs, Scorer
from tasks.kernel.errors import ConversionParityError
from tests.support.conversion.cases import judged_rows

BOUND = QualityBound(max_gap=0.01, mean_gap=0.001, quality_drop=0.0)
SCORES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30)


@given(SCORES, st.data())
def test_one_changed_score_is_the_largest_gap(scores: list[float], data: st.DataObject) -> None:
    reference = np.array(scores)
    position = data.draw(st.integers(0, len(scores) - 1))
    converted = reference.copy()
    converted[position] = 1 - converted[position]
    gap = score_gap(reference, converted, score_distances)
    assert gap.largest == pytest.approx(abs(1 - 2 * reference[position]))
    assert gap.mean == pytest.approx(gap.largest / len(scores))


def test_no_rows_have_no_gap_and_another_shape_is_an_error() -> None:
    assert score_gap(np.empty(0), np.empty(0), score_distances).largest == 0.0
    with pytest.raises(ConversionParityError, match=r"returned shape \(3, 1\), expected \(3,\)"):
        score_gap(np.zeros(3), np.zeros((3, 1)), score_distances)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1])
def test_a_value_that_is_not_finite_is_an_error_that_says_whose(
    value: float, position: int
) -> None:
    pair = [np.array([0.5, 0.5]), np.array([0.5, 0.5])]
    pair[position][1] = value
    whose = ("PyTorch program", "converted model")[position]
    with pytest.raises(ConversionParityError, match=f"the {whose} gives NaN or Inf for 1 of 2"):
        score_gap(*pair, score_distances)


@pytest.mark.parametrize(
    "shape",
    [lambda rows: (1,), lambda rows: (rows, rows), lambda rows: ()],
    ids=["ignores-the-rows", "as-wide-as-long", "one-number"],
)
def test_a_model_whose_answers_do_not_follow_the_rows_is_found(
    typical: ModelInputs, shape: Callable[[int], tuple[int, ...]]
) -> None:
    def model(inputs: ModelInputs) -> np.ndarray:
        return np.zeros(shape(inputs.num_rows), dtype=np.float32)

    with pytest.raises(ConversionParityError, match="was the batch axis exported as dynamic"):
        score_batches(model, (typical.block(0, 2), typical.block(0, 3)))


def test_an_error_at_one_batch_size_alone_is_found(edges: ModelInputs) -> None:
    def right(inputs: ModelInputs) -> np.ndarray:
        return np.full(inputs.num_rows, 0.5, dtype=np.float32)

    def wrong_at_seven(inputs: ModelInputs) -> np.ndarray:
        return right(inputs) + (0.25 if inputs.num_rows == 7 else 0.0)

    batches = edge_batches(edges)
    assert {batch.num_rows for batch in batches} == {1, 2, 7, 1024}
    expected, same, wrong = (score_batches(m, batches) for m in (right, right, wrong_at_seven))
    assert score_gap(expected, same, score_distances).largest == 0.0
    assert score_gap(expected, wrong, score_distances).largest == 0.25


@pytest.mark.parametrize(
    ("test", "edge", "timed", "sentence"),
    [
        ((0.01, 0.001), 0.01, 0.01, None),
        ((0.02, 0.001), 0.0, 0.0, "an answer differs by 0.02 from PyTorch on 9 test rows"),
        ((0.0, 0.0), 0.5, 0.0, "an answer differs by 0.5 from PyTorch on 4 edge rows"),
        ((0.0, 0.0), 0.0, 0.5, "an answer differs by 0.5 from PyTorch on 3 timed rows"),
        ((0.01, 0.002), 0.0, 0.0, "answers differ by 0.002 from PyTorch on average over 9"),
    ],
)
def test_gaps_beyond_a_bound_are_a_sentence(
    test: tuple[float, float], edge: float, timed: float, sentence: str | None
) -> None:
    gaps = {
        "test": ScoreGap(*test, num_rows=9),
        "edge": ScoreGap(edge, edge, 4),
        "timed": ScoreGap(timed, timed, 3),
    }
    failure = parity_failure(gaps, BOUND, "")
    assert (failure is None) if sentence is None else str(failure).startswith(sentence)
    wider = parity_failure(gaps, BOUND.model_copy(update={"edge_gap": 0.5}), "")
    assert (wider is None) == (sentence is None or edge == 0.5)  # edge rows alone


def test_rows_that_the_source_itself_has_no_answer_for_are_left_out() -> None:
    reference = np.array([0.1, np.nan, np.inf, 0.4])
    gap = score_gap(reference, np.array([0.1, 0.7, np.nan, 0.5]), score_distances, answered=True)
    assert gap.num_rows == 2
    assert gap.largest == pytest.approx(0.1)
    with pytest.raises(ConversionParityError, match="converted model gives NaN or Inf for 1 of 2"):
        score_gap(reference, np.array([np.nan, 0.7, 0.2, 0.5]), score_distances, answered=True)


def test_far_from_the_labels_a_gap_of_a_number_counts_in_parts_of_its_distance() -> None:
    reference, other = np.array([51.0, 1e9, -1e9]), np.array([52.0, 1e9 + 100, -1e9])
    near, far, same = score_distances(reference, other, unit=2.0, centre=50.0)
    assert near == pytest.approx(0.5)
    assert far == pytest.approx(1e-6)
    assert same == 0
    assert score_distances(reference, other)[1] == pytest.approx(100)


BATCHES = tuple(ModelInputs({"x": np.arange(s, s + 100.0)}) for s in range(0, 2000, 100))
LOOSE = QualityBound(max_gap=0.04, mean_gap=0.004, quality_drop=0.1)


def _dependence(model: Scorer) -> str | None:
    scores = np.concatenate([model(batch) for batch in BATCHES])
    return batch_invariance_failure(model, judged_rows(*BATCHES), scores, LOOSE)


def test_an_answer_that_depends_on_the_call_or_changes_each_time_is_not_batch_invariant() -> None:
    count = itertools.count()

    def by_size(batch: ModelInputs) -> np.ndarray:
        return (0.0001 * len(batch["x"]) + np.sin(batch["x"]) / 2).astype(np.float32)

    def by_time(batch: ModelInputs) -> np.ndarray:
        return (np.sin(batch["x"]) / 2 + 1e-5 * next(count)).astype(np.float32)

    assert _dependence(lambda batch: (np.sin(batch["x"]) / 2).astype(np.float32)) is None
    assert "depends on the other rows of its call" in (_dependence(by_size) or "")
    assert "when the same rows are asked for again" in (_dependence(by_time) or "")


@given(st.integers(6, 200))
def test_the_interval_holds_the_median_with_95_percent_and_not_much_more(count: int) -> None:
    interval = median_interval(np.arange(1, count + 1))
    rank = round(interval.low)
    assert interval.high == count + 1 - rank
    missed = 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
    narrower = missed + 2 * math.comb(count, rank) / 2**count
    assert missed <= 0.05 < narrower
    few = median_interval(np.arange(5))
    assert (few.low, few.high) == (0, 4)
