import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tasks.contracts.data import DatasetSchema, category_code
from tasks.kernel.errors import DataContractError
from tasks.training.data.preprocess import (
    MAX_MAGNITUDE,
    Preprocessing,
    fit_edges,
    fit_preprocessing,
    fit_vocabulary,
)

# Found by a search over c0, c1, ...: their CRC-32 agree in the lower 31 bits.
COLLIDING = ("c3985819", "c4420602")


def test_categories_that_share_a_code_are_refused() -> None:
    with pytest.raises(DataContractError, match=r"column 'carrier'.*same 31-bit code as category"):
        fit_vocabulary("carrier", {COLLIDING[0]: 90, COLLIDING[1]: 1}, min_rows=20)


def test_rare_and_missing_categories_are_left_out() -> None:
    vocabulary = fit_vocabulary("carrier", {"AA": 50, "UA": 20, "OO": 19, "": 500}, min_rows=20)
    assert set(vocabulary) == {category_code("AA"), category_code("UA")}
    assert (np.diff(vocabulary) > 0).all()


@given(
    known=st.sets(st.text(min_size=1), max_size=8),
    asked=st.lists(st.one_of(st.none(), st.text()), min_size=1, max_size=20),
)
def test_positions_agree_with_a_dictionary(known: set[str], asked: list[str | None]) -> None:
    vocabulary = np.array(sorted({category_code(k) for k in known} - {0}), dtype=np.int32)
    table = {int(code): position for position, code in enumerate(vocabulary)}
    codes = np.array([[category_code(a)] for a in asked], dtype=np.int32)
    positions = Preprocessing((vocabulary,), (), ()).category_positions(codes)
    assert positions[:, 0].tolist() == [table.get(int(c), len(vocabulary)) for c in codes[:, 0]]


@given(hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32)), st.integers(2, 20))
def test_edges_increase_and_span_the_finite_values(values: np.ndarray, num_bins: int) -> None:
    edges = fit_edges(values, num_bins)
    finite = values[np.abs(values) < MAX_MAGNITUDE]
    assert len(edges) <= num_bins + 1
    assert (np.diff(edges.astype(np.float64)) > 0).all()
    with np.errstate(all="raise"):
        assert np.isfinite(np.float32(1) / np.diff(edges)).all()
    if len(edges):
        assert edges[0] == finite.min()
        assert edges[-1] <= finite.max()


def test_columns_of_which_none_varies_are_refused() -> None:
    columns = DatasetSchema(
        row_id="id", event_time="at", label="y", categorical=("kind",), numeric=("size",)
    )
    with pytest.raises(DataContractError, match="none of 1 categorical and 1 numeric columns"):
        fit_preprocessing(
            columns,
            {"kind": {"": 40, "rare": 2}},
            np.full((40, 1), 5, dtype=np.float32),
            [False],
            min_category_rows=20,
            num_bins=4,
        )
