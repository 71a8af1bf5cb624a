from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.conversion.config import QualityBound
from tasks.conversion.parity import ScoreGap, edge_gap, parity_failure, score_gap, score_rows
from tasks.conversion.rows import BLOCK_ROWS, ModelInputs
from tasks.errors import ConversionParityError

BOUND = QualityBound(max_gap=0.01, mean_gap=0.001, auc_drop=0.0)
SCORES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30)


@given(SCORES)
def test_a_model_agrees_with_itself(scores: list[float]) -> None:
    values = np.array(scores, dtype=np.float32)
    assert score_gap(values, values) == ScoreGap(largest=0.0, mean=0.0, num_rows=len(values))


@given(SCORES, st.data())
def test_one_changed_score_is_the_largest_gap(scores: list[float], data: st.DataObject) -> None:
    reference = np.array(scores)
    position = data.draw(st.integers(0, len(scores) - 1))
    converted = reference.copy()
    converted[position] = 1 - converted[position]
    gap = score_gap(reference, converted)
    assert gap.largest == pytest.approx(abs(1 - 2 * reference[position]))
    assert gap.mean == pytest.approx(gap.largest / len(scores))


def test_no_rows_have_no_gap() -> None:
    assert score_gap(np.empty(0), np.empty(0)).largest == 0.0


def test_another_shape_is_an_error() -> None:
    with pytest.raises(ConversionParityError, match=r"returned shape \(3, 1\), expected \(3,\)"):
        score_gap(np.zeros(3), np.zeros((3, 1)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1])
def test_a_value_that_is_not_finite_is_an_error_that_says_whose(
    value: float, position: int
) -> None:
    pair = [np.array([0.5, 0.5]), np.array([0.5, 0.5])]
    pair[position][1] = value
    whose = ("PyTorch program", "converted model")[position]
    with pytest.raises(ConversionParityError, match=f"the {whose} gives NaN or Inf for 1 of 2"):
        score_gap(*pair)


def test_a_model_that_ignores_the_number_of_rows_is_found(typical: ModelInputs) -> None:
    def one_score(categorical: np.ndarray, numeric: np.ndarray) -> np.ndarray:
        return np.zeros(1, dtype=np.float32)

    with pytest.raises(ConversionParityError, match=r"shape \(1,\) for 1500 rows"):
        score_rows(one_score, typical)


def test_rows_are_scored_in_blocks_and_in_order() -> None:
    rows = BLOCK_ROWS + 5
    inputs = ModelInputs(
        np.zeros((rows, 1), np.int32), np.arange(rows, dtype=np.float32).reshape(-1, 1)
    )
    sizes = []

    def first_number(categorical: np.ndarray, numeric: np.ndarray) -> np.ndarray:
        sizes.append(len(numeric))
        return numeric[:, 0]

    np.testing.assert_array_equal(score_rows(first_number, inputs), np.arange(rows))
    assert sizes == [BLOCK_ROWS, 5]


def test_an_error_at_one_batch_size_alone_is_found(edges: ModelInputs) -> None:
    def right(categorical: np.ndarray, numeric: np.ndarray) -> np.ndarray:
        return np.full(len(numeric), 0.5, dtype=np.float32)

    def wrong_at_seven(categorical: np.ndarray, numeric: np.ndarray) -> np.ndarray:
        return right(categorical, numeric) + (0.25 if len(numeric) == 7 else 0.0)

    assert edge_gap(right, right, edges).largest == 0.0
    assert edge_gap(right, wrong_at_seven, edges).largest == 0.25


@pytest.mark.parametrize(
    ("rows", "edges", "sentence"),
    [
        ((0.01, 0.001), 0.01, None),
        ((0.02, 0.001), 0.0, "a probability differs by 0.02 from PyTorch on 9 test rows"),
        ((0.0, 0.0), 0.5, "a probability differs by 0.5 from PyTorch on 4 edge rows"),
        ((0.01, 0.002), 0.0, "probabilities differ by 0.002 from PyTorch on average over 9"),
    ],
)
def test_gaps_beyond_a_bound_are_a_sentence(
    rows: tuple[float, float], edges: float, sentence: str | None
) -> None:
    failure = parity_failure(ScoreGap(*rows, num_rows=9), ScoreGap(edges, edges, 4), BOUND)
    if sentence is None:
        assert failure is None
    else:
        assert failure is not None
        assert failure.startswith(sentence)
