from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tasks.training.strategies.partition import cut_evenly


def largest_part(sizes: list[int], cuts: tuple[int, ...]) -> int:
    edges = [0, *cuts, len(sizes)]
    return max(sum(sizes[a:b]) for a, b in itertools.pairwise(edges))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_smaller_largest_part(sizes: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(sizes)))
    parts = cut_evenly(sizes, num_parts)
    assert len(parts) == num_parts
    assert [n for part in parts for n in range(len(sizes))[part]] == list(range(len(sizes)))
    assert all(part.start < part.stop for part in parts)
    best = min(
        largest_part(sizes, cuts)
        for cuts in itertools.combinations(range(1, len(sizes)), num_parts - 1)
    )
    assert largest_part(sizes, tuple(part.start for part in parts[1:])) == best
