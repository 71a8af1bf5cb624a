import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.kernel.errors import WindowError
from tasks.training.data.derived import new_rows_window, replay_probability, replayed
from tests.support.data.builders import month


def test_new_rows_begin_where_the_champion_ended() -> None:
    assert new_rows_window(month(1, 8), month(1, 6)) == month(7, 2)
    assert new_rows_window(month(8, 1), month(1, 6)) == month(8, 1)


@pytest.mark.parametrize("champion", [month(1, 8), month(2, 9)])
def test_a_window_without_new_rows_is_refused(champion: object) -> None:
    with pytest.raises(WindowError, match="nothing new is there to learn"):
        new_rows_window(month(1, 8), champion)  # type: ignore[arg-type]


def ids(*numbers: int) -> pa.ChunkedArray:
    return pa.chunked_array([list(numbers)])


@settings(max_examples=10)
@given(num_new=st.integers(1, 5000), num_old=st.integers(0, 20_000), share=st.floats(0.0, 0.95))
def test_older_rows_are_the_share_that_was_asked_for(
    num_new: int, num_old: int, share: float
) -> None:
    probability = replay_probability(num_new, num_old, share)
    kept = int(replayed(ids(*range(num_old)), probability, seed=3).sum()) if num_old else 0
    wanted = min(num_old, share / (1 - share) * num_new)
    assert abs(kept - wanted) <= 5 * np.sqrt(wanted) + 1


def test_the_choice_is_a_matter_of_the_row_and_the_seed_alone() -> None:
    names = [f"UA{number}-EWR-20130101" for number in range(10_000)]
    chosen = replayed(pa.chunked_array([names[:4000], names[4000:]]), 0.3, 0)
    assert 0.28 < chosen.mean() < 0.32
    assert np.array_equal(replayed(pa.chunked_array([names[::-1]]), 0.3, 0)[::-1], chosen)
    one, other = (replayed(ids(*range(10_000)), 0.5, seed) for seed in (0, 1))
    assert 0.45 < (one == other).mean() < 0.55
    assert not replayed(ids(1, 2), 0.0, 0).any()
    assert replayed(ids(1, 2), 1.0, 0).all()
