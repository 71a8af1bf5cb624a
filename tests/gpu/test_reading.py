from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.training.data.source import RowSource
from tasks.training.data.store import RowStore
from tests.support.data.builders import YEAR, frame
from tests.support.training.reading_ranks import (
    PLAN,
    SHUFFLE,
    assert_equal,
    preprocessing,
    write,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_batches_for_a_gpu_are_in_page_locked_memory_and_hold_the_same_rows(
    tmp_path: Path,
) -> None:
    store = RowStore(tmp_path, write(tmp_path, frame(901)), YEAR, range(0, 5, 2), lambda: None)
    plain = RowSource(store, preprocessing(), SHUFFLE, PLAN)
    pinned = RowSource(store, preprocessing(), SHUFFLE, PLAN, num_threads=1, pinned=True)
    for ours, theirs in zip(pinned.batches(0), plain.batches(0), strict=True):
        assert all(part.is_pinned() for part in (*ours.inputs, ours.labels))
        assert_equal(ours, theirs)
