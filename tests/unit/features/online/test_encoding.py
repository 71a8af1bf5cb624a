"""Bytes laid out for whole columns against those that Feast's own code makes cell by cell."""

import pyarrow as pa
import pytest
from feast.protos.feast.types.Value_pb2 import Value
from feast.type_map import python_values_to_proto_values
from feast.value_type import ValueType

from tasks.features.online.encoding import encode_column, encode_entity_keys, encode_rows
from tasks.kernel.errors import DataContractError
from tests.support.data.feature_views import COLUMNS, SLOW, make_rows

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")


def by_feast(column: pa.Array, value_type: ValueType) -> list[bytes]:
    values = python_values_to_proto_values(column.to_numpy(zero_copy_only=False), value_type)
    return [value.SerializeToString() for value in values]


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("nulls", [False, True])
def test_every_type_is_written_as_feast_writes_it(name: str, nulls: bool) -> None:
    feast_type, kind, values = COLUMNS[name]
    column = pa.array([*values, *([None] if nulls else [])] * 2, kind)
    encoded = encode_column(column, feast_type.to_value_type())
    assert encoded.cells.to_pylist() == by_feast(column, feast_type.to_value_type())
    assert encoded.converted_by_feast == (name in SLOW)


@pytest.mark.parametrize("name", sorted(COLUMNS.keys() - SLOW))
def test_a_slice_of_a_column_is_written_like_a_column_of_its_own(name: str) -> None:
    feast_type, kind, values = COLUMNS[name]
    column = pa.array([None, *values, None, *values], kind)
    whole = encode_column(column, feast_type.to_value_type()).cells.to_pylist()
    assert encode_column(column[2:-1], feast_type.to_value_type()).cells.to_pylist() == whole[2:-1]


def test_a_large_integer_beside_a_null_keeps_its_last_digits() -> None:
    """Feast's own way goes through floats here and loses them; a null must not change a value."""
    exact = 2**53 + 1
    column = pa.array([exact, None], pa.int64())
    assert encode_column(column, ValueType.INT64).cells.to_pylist() == [
        Value(int64_val=exact).SerializeToString(),
        b"",
    ]
    assert by_feast(column, ValueType.INT64)[0] == Value(int64_val=2**53).SerializeToString()


def test_a_number_that_does_not_fit_is_refused_by_feast() -> None:
    with pytest.raises(ValueError, match=r"out of range|outside"):
        encode_column(pa.array([2**40]), ValueType.INT32)


def test_a_null_in_a_join_key_is_named_with_its_count() -> None:
    batch = pa.record_batch({"id": pa.array([1, None, None], pa.int64())})
    with pytest.raises(DataContractError, match="join key id is null in 2 of 3 rows"):
        encode_entity_keys(batch, {"id": ValueType.INT64})


def test_rows_without_a_time_or_a_column_are_refused() -> None:
    batch = make_rows(0, ["number"], ["bool"], 3, "us", "UTC")
    keys, features = {"number": ValueType.INT64}, {"bool": ValueType.BOOL}
    with pytest.raises(DataContractError, match="gave no column later"):
        encode_rows(batch, keys, features, "later", None)
    nulls = batch.set_column(
        batch.schema.get_field_index("event"), "event", pa.nulls(3, pa.timestamp("us"))
    )
    with pytest.raises(DataContractError, match="event is null in 3 of 3 rows"):
        encode_rows(nulls, keys, features, "event", None)
