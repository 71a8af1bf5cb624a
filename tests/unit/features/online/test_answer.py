import math
import struct
from typing import Any

import numpy as np
import pytest
from feast.protos.feast.types.Value_pb2 import Value
from feast.value_type import ValueType
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from tasks.features.online.answer import NEVER, FloatBlock, decode_value, moments, protobuf_moment
from tasks.kernel.errors import FeatureStoreError

FLOATS = st.one_of(
    st.none(), st.floats(width=32, allow_nan=False), st.just(-0.0), st.just(math.inf)
)


def cell(value: Any, name: str = "float_val") -> bytes:
    packed: bytes = Value(**{name: value}).SerializeToString() if value is not None else b""
    return packed


@given(
    rows=st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=8),
    never_written=st.booleans(),
)
@pytest.mark.parametrize(
    ("kind", "name"), [(ValueType.FLOAT, "float_val"), (ValueType.DOUBLE, "double_val")]
)
def test_a_block_holds_the_numbers_that_protobuf_gives(
    kind: ValueType, name: str, rows: list[list[float | None]], never_written: bool
) -> None:
    null = None if never_written else b""
    cells = [[null if v is None else cell(v, name) for v in row] for row in rows]
    span = ([[b"before", *row, b"after"] for row in cells], 1, 4)
    other = ([[cell(1.0, name)], [cell(2.0, name)]], 0, 1)
    block, beside = FloatBlock(kind).decode([span, other])
    assert beside.tolist() == [[1.0, 2.0]]
    assert block.shape == (3, len(rows))
    assert block.dtype == (np.float32 if kind == ValueType.FLOAT else np.float64)
    for column in range(3):
        for at, row in enumerate(rows):
            found = block[column, at].item()
            expected = row[column]
            if expected is None:
                assert math.isnan(found)
            else:
                assert struct.pack("d", found) == struct.pack("d", expected)


def test_a_float_that_was_stored_as_another_type_is_converted() -> None:
    rows = [[cell(1.5), cell(2.5, "double_val"), cell(7, "int64_val"), None]]
    block = FloatBlock(ValueType.FLOAT).decode([(rows, 0, 4)])[0]
    assert block[:3, 0].tolist() == [1.5, 2.5, 7.0]
    assert np.isnan(block[3, 0])


def test_a_text_in_a_float_column_is_named_even_where_the_lengths_add_up() -> None:
    """A text of eight letters and a null are together as long as two floats."""
    row = [cell("12345678", "string_val"), b""]
    assert len(b"".join(row)) == 2 * len(cell(1.0))
    with pytest.raises(FeatureStoreError, match="holds the str '12345678' where a number"):
        FloatBlock(ValueType.FLOAT).decode([([row], 0, 2)])


def test_bytes_that_are_no_value_are_named() -> None:
    with pytest.raises(FeatureStoreError, match="where a serialized Feast value"):
        decode_value(b"\xff\xff", ValueType.STRING)
    with pytest.raises(FeatureStoreError, match="where an event time was expected"):
        protobuf_moment(b"\xff\xff")


def test_an_event_at_the_epoch_is_not_a_missing_one() -> None:
    rows = [["value", b"", None], ["value", None, Timestamp(seconds=1).SerializeToString()]]
    assert moments(rows, 1, protobuf_moment) == [[0, NEVER], [NEVER, 1_000_000]]
