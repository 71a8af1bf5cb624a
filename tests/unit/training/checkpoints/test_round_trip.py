"""Any state comes back to the last bit, whatever it holds and however it is cut."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tasks.training.checkpoints.manifest import CheckpointRef
from tasks.training.checkpoints.state import (
    DTYPES,
    TensorRows,
    name_of,
    put_together,
    take_apart,
)
from tests.support.training.states import assert_equal, store_in_memory

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), max_size=12)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    st.text(st.characters(codec="utf-8"), max_size=20),
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any kind and shape, any bits (NaNs too), contiguous or not."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    content = np.random.default_rng(seed).bytes(prod(shape) * dtype.itemsize)
    bits = torch.from_numpy(np.frombuffer(content or b"", dtype=np.uint8).copy())
    if dtype == torch.bool:
        bits &= 1
    tensor = bits.view(dtype).reshape(shape) if bits.numel() else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


def containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(NAMES, items, max_size=4),
        st.dictionaries(st.integers(0, 99), items, max_size=4),
        st.lists(items, max_size=3),
        st.lists(items, max_size=3).map(tuple),
    )


STATES = st.dictionaries(NAMES, st.recursive(PLAIN | tensors(), containers, max_leaves=12))


@given(STATES, st.integers(16, 600))
def test_any_state_round_trips_with_any_size_of_parts(
    state: dict[str, Any], shard_bytes: int
) -> None:
    store = store_in_memory(shard_bytes)
    ref = store.save(0, 0, state)
    assert store.newest() == ref
    assert_equal(store.load(ref), state)


@given(STATES)
def test_a_state_is_put_together_as_it_was_taken_apart(state: dict[str, Any]) -> None:
    taken = take_apart(state)
    assert_equal(put_together(taken.plain, taken.values()), state)


@given(STATES, st.data())
def test_asking_for_some_tensors_gives_exactly_these(
    state: dict[str, Any], data: st.DataObject
) -> None:
    names = [name_of(keys) for keys in take_apart(state).tensors]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    store = store_in_memory()
    loaded = take_apart(store.load(store.save(0, 0, state), chosen)).values()
    whole = take_apart(state).values()
    assert sorted(map(name_of, loaded)) == sorted(chosen)
    for keys, tensor in loaded.items():
        assert_equal(tensor, whole[keys])


@given(tensors(), st.lists(st.integers(0, 7), max_size=4), st.integers(16, 200))
def test_rows_that_ranks_write_apart_make_the_whole_tensor(
    tensor: Tensor, cuts: list[int], shard_bytes: int
) -> None:
    whole = tensor.reshape(-1, 1) if not tensor.ndim else tensor
    bounds = sorted(min(cut, len(whole)) for cut in [0, *cuts, len(whole)])
    store, ref = store_in_memory(shard_bytes), CheckpointRef.new(1, 0)
    sections = [
        store.write_section(
            ref,
            take_apart({"w": TensorRows(whole[first:last], first, len(whole)), "rank": rank}),
            rank,
        )
        for rank, (first, last) in enumerate(pairwise(bounds))
    ]
    store.finish(ref, sections[::-1], {"w": None, "rank": 0})
    assert store.newest() == ref
    assert_equal(store.load(ref), {"w": whole, "rank": 0})
