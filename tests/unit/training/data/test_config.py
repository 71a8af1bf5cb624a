from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.training.data.config import EXECUTION_FIELDS, ReadingConfig


def test_pools_smaller_than_a_piece_are_refused_with_the_fix() -> None:
    with pytest.raises(ValidationError, match=r"shuffle_rows=10 is below piece_rows=64.*multiple"):
        ReadingConfig(shuffle_rows=10)


def test_what_is_computed_does_not_depend_on_how_rows_are_read() -> None:
    streamed = ReadingConfig(mode="stream", prefetch_pools=3, reader_threads=2, memory_share=0.1)
    assert streamed.computation() == ReadingConfig().computation()
    assert streamed.computation().keys() == set(ReadingConfig.model_fields) - EXECUTION_FIELDS
    assert ReadingConfig(piece_rows=128).computation() != ReadingConfig().computation()
