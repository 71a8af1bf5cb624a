from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.training.data.memory import MemoryRows
from tasks.training.data.source import RowSource
from tasks.training.data.store import FileStore, MemoryStore
from tasks.training.data.stream import StreamedRows
from tests.support.data.builders import YEAR, frame
from tests.support.training.row_files import SHUFFLE, assert_equal, preprocessing, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_batches_for_a_gpu_lie_in_page_locked_memory_and_hold_the_same_rows(
    tmp_path: Path,
) -> None:
    snapshot, shards = write(tmp_path, frame(901)), range(0, 5, 2)
    layout, fitted = snapshot.layout, preprocessing()
    memory = MemoryRows(
        MemoryStore(snapshot, YEAR, shards, lambda: None), layout, fitted, SHUFFLE, pinned=False
    )
    pinned: list[RowSource] = [
        MemoryRows(
            MemoryStore(snapshot, YEAR, shards, lambda: None), layout, fitted, SHUFFLE, pinned=True
        ),
        StreamedRows(
            FileStore(tmp_path / "rows", snapshot, YEAR, shards, lambda: None),
            layout,
            fitted,
            SHUFFLE,
            num_threads=1,
            pinned=True,
        ),
    ]
    for source in pinned:
        for ours, plain in zip(source.batches(0), memory.batches(0), strict=True):
            assert all(part.is_pinned() for part in (*ours.inputs, ours.labels))
            assert_equal(ours, plain)
