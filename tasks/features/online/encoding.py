"""Arrow columns as the bytes that Feast keeps online, without a Python object for any cell.

Feast's online stores hold every value as a serialized `feast.types.Value`, every entity as a
serialized key and, in Redis, the event time as a serialized protobuf `Timestamp`. Here the same
bytes are laid out by numpy and Arrow for whole columns. Whatever has no layout here is converted by
Feast's own code, cell by cell, and counted by the caller. Byte layout: protobuf's encoding
specification, and `serialize_entity_key` of Feast, version 3.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from feast.infra.key_encoding_utils import _serialize_val
from feast.protos.feast.types.Value_pb2 import Value
from feast.protos.feast.types.Value_pb2 import ValueType as KeyType
from feast.type_map import python_values_to_proto_values
from feast.value_type import ValueType

from tasks.kernel.errors import DataContractError

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
BINARY = pa.large_binary()

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""

NO_TIME = np.iinfo(np.int64).min
"""What Feast stores for a missing timestamp, and numpy for `NaT`."""


@dataclass(frozen=True)
class EncodedColumn:
    """Serialized values of one feature, one for each row; empty bytes for a missing value."""

    cells: pa.LargeBinaryArray
    converted_by_feast: bool


@dataclass(frozen=True)
class EncodedRows:
    """Rows of one feature view, ready for an online store.

    `keys` are serialized entity keys without a project. Times are microseconds since 1970 in UTC;
    `created_us` is None where the source has no created time.
    """

    keys: pa.LargeBinaryArray
    events_us: Integers
    created_us: Integers | None
    features: dict[str, EncodedColumn]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_converted_by_feast(self) -> int:
        """Cells for which there is no layout here."""
        return len(self) * sum(f.converted_by_feast for f in self.features.values())


def encode_rows(
    batch: pa.RecordBatch,
    join_keys: Mapping[str, ValueType],
    features: Mapping[str, ValueType],
    event_column: str,
    created_column: str | None,
) -> EncodedRows:
    """Encode one batch of a feature view.

    Args:
        batch: columns by their names in the view.
        join_keys: name to declared type.
        features: name to declared type.
        event_column: when each row's values held.
        created_column: when each row was made; None where the source does not say.

    Raises:
        DataContractError: a column is absent, or a join key or event time is null.
    """
    wanted = [*join_keys, *features, event_column, *([created_column] if created_column else [])]
    if missing := sorted(set(wanted) - set(batch.schema.names)):
        raise DataContractError(
            f"the source gave no column {', '.join(missing)}; expected all that the feature view "
            "names. Nothing of this batch was written"
        )
    events_us = microseconds(batch.column(event_column), event_column)
    if (events_us == NO_TIME).any():
        raise DataContractError(
            f"{event_column} is null in {(events_us == NO_TIME).sum():,} of {len(batch):,} rows; "
            "expected the moment from which the values hold. Nothing of this batch was written"
        )
    return EncodedRows(
        keys=encode_entity_keys(batch, join_keys),
        events_us=events_us,
        created_us=(
            microseconds(batch.column(created_column), created_column) if created_column else None
        ),
        features={name: encode_column(batch.column(name), kind) for name, kind in features.items()},
    )


def encode_column(column: pa.Array, value_type: ValueType) -> EncodedColumn:
    """Serialize a feature's values as Feast does.

    Args:
        column: Arrow values of one batch.
        value_type: the feature's declared type.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    native = _LAYOUTS.get(value_type)
    cells = native(column, value_type) if native else None
    if cells is not None:
        return EncodedColumn(cells, converted_by_feast=False)
    slow = [message.SerializeToString() for message in _by_feast(column, value_type)]
    return EncodedColumn(pa.array(slow, BINARY), converted_by_feast=True)


def _by_feast(column: pa.Array, value_type: ValueType) -> list[Value]:
    messages: list[Value] = python_values_to_proto_values(
        column.to_numpy(zero_copy_only=False), value_type
    )
    return messages


def encode_entity_keys(
    batch: pa.RecordBatch, join_keys: Mapping[str, ValueType]
) -> pa.LargeBinaryArray:
    """Serialized entity key, version 3, of every row.

    Args:
        batch: rows that hold the join keys.
        join_keys: name to declared type.

    Raises:
        DataContractError: a key is null, or of a type that cannot be a key.
    """
    ordered = sorted(join_keys)
    names = [struct.pack("<II", KeyType.STRING, len(n.encode())) + n.encode() for n in ordered]
    parts: list[pa.Array | pa.Scalar] = [
        constant(struct.pack("<I", len(ordered)) + b"".join(names))
    ]
    for name in ordered:
        column = batch.column(name)
        if column.null_count:
            raise DataContractError(
                f"join key {name} is null in {column.null_count:,} of {len(column):,} rows; "
                "expected a value in each, because a null names no entity. Drop these rows in the "
                "source of the feature view. They were not written"
            )
        parts += _key_parts(name, column, join_keys[name])
    return join_parts(parts, batch.num_rows)


def microseconds(column: pa.Array, name: str) -> Integers:
    """Moments as microseconds since 1970 in UTC; a time without zone is UTC, as in Feast.

    A null is `NO_TIME`. Fractions of a microsecond are cut off, as Feast does.

    Raises:
        DataContractError: the column holds no times.
    """
    if not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        raise DataContractError(f"column {name} is {column.type}, expected a timestamp")
    moments = column.to_numpy(zero_copy_only=False)
    result: Integers = moments.astype("datetime64[us]").astype(np.int64)
    return result


def encode_timestamps(moments_us: Integers) -> pa.LargeBinaryArray:
    """Serialized protobuf `Timestamp` of microseconds since 1970; zero parts are left out."""
    seconds, rest_us = np.divmod(moments_us, 1_000_000)
    parts = [
        tagged_varints(bytes([number << 3 | VARINT]), part, part != 0)
        for number, part in ((1, seconds), (2, rest_us * 1000))
    ]
    return join_parts(parts, len(moments_us))


def _key_parts(name: str, column: pa.Array, value_type: ValueType) -> list[pa.Array | pa.Scalar]:
    """Type, length and bytes of one join key."""
    width = {ValueType.INT64: 8, ValueType.INT32: 4}.get(value_type)
    if width and pa.types.is_integer(column.type):
        key_type = KeyType.INT64 if width == 8 else KeyType.INT32
        values = pc.cast(column, f"int{width * 8}").to_numpy(zero_copy_only=False)
        return [constant(struct.pack("<II", key_type, width)), fixed(b"", values, None)]
    if value_type == ValueType.STRING and _is_text(column.type):
        data = pc.cast(column, BINARY)
        lengths = pc.binary_length(data).to_numpy(zero_copy_only=False).astype("<u4")
        return [constant(struct.pack("<I", KeyType.STRING)), fixed(b"", lengths, None), data]
    try:
        values = _by_feast(column, value_type)
        packed = [_serialize_val(value.WhichOneof("val"), value, 3) for value in values]
    except ValueError as exc:
        raise DataContractError(
            f"join key {name} is {value_type.name}, which cannot be an entity key ({exc}); "
            "expected a string, bytes, integer or timestamp"
        ) from exc
    return [pa.array([struct.pack("<II", t, len(v)) + v for v, t in packed], BINARY)]


def _floats(column: pa.Array, value_type: ValueType) -> pa.LargeBinaryArray | None:
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        return None
    values = pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    present = ~np.isnan(values)  # Feast takes NaN for a missing value
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32 if value_type == ValueType.FLOAT else np.float64)
    return fixed(_tag(value_type), numbers, None if present.all() else present)


def _whole(column: pa.Array, value_type: ValueType) -> pa.LargeBinaryArray | None:
    """Integers and truth values."""
    is_bool = value_type == ValueType.BOOL
    if not (pa.types.is_boolean(column.type) if is_bool else pa.types.is_integer(column.type)):
        return None
    try:
        whole = pc.cast(column, pa.int32() if value_type == ValueType.INT32 else pa.int64())
    except pa.ArrowInvalid:
        return None  # out of range: Feast says which value
    values = pc.fill_null(whole, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return tagged_varints(_tag(value_type), values, present_rows(column))


def _timestamps(column: pa.Array, value_type: ValueType) -> pa.LargeBinaryArray | None:
    if not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        return None
    seconds = column.to_numpy(zero_copy_only=False).astype("datetime64[s]").astype(np.int64)
    everything = np.ones(len(column), bool)  # a missing time is a value of its own: `NO_TIME`
    return tagged_varints(_tag(value_type), seconds, everything)


def _delimited(column: pa.Array, value_type: ValueType) -> pa.LargeBinaryArray | None:
    """Texts and bytes."""
    fits = _is_blob if value_type == ValueType.BYTES else _is_text
    return delimited(_tag(value_type), column) if fits(column.type) else None


_LAYOUTS: dict[ValueType, Callable[[pa.Array, ValueType], pa.LargeBinaryArray | None]] = {
    **dict.fromkeys((ValueType.FLOAT, ValueType.DOUBLE), _floats),
    **dict.fromkeys((ValueType.INT32, ValueType.INT64, ValueType.BOOL), _whole),
    ValueType.UNIX_TIMESTAMP: _timestamps,
    **dict.fromkeys((ValueType.STRING, ValueType.BYTES), _delimited),
    **dict.fromkeys((ValueType.UUID, ValueType.TIME_UUID, ValueType.DECIMAL), _delimited),
}
_WIRE_TYPES = {
    ValueType.FLOAT: FIXED32,
    ValueType.DOUBLE: FIXED64,
    **dict.fromkeys(
        (ValueType.INT32, ValueType.INT64, ValueType.BOOL, ValueType.UNIX_TIMESTAMP), VARINT
    ),
}


def _tag(value_type: ValueType) -> bytes:
    """Key of the field of `Value` that holds this type, as a varint."""
    number = Value.DESCRIPTOR.fields_by_name[f"{value_type.name.lower()}_val"].number
    key = number << 3 | _WIRE_TYPES.get(value_type, LENGTH_DELIMITED)
    return bytes([key]) if key < 0x80 else bytes([key & 0x7F | 0x80, key >> 7])


def _is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _is_blob(kind: pa.DataType) -> bool:
    named = str(kind) in ("binary", "large_binary", "binary_view")
    return bool(named or pa.types.is_fixed_size_binary(kind))


# Every function below makes one byte string for each row, as an Arrow array that holds them one
# after the other.


def binary_array(data: Bytes, lengths: Integers) -> pa.LargeBinaryArray:
    """Array of byte strings that lie one after the other in `data`."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return from_offsets(offsets, data)


def contents(array: pa.LargeBinaryArray) -> tuple[Integers, Bytes]:
    """Offsets, starting at 0, and the bytes of an array without nulls; nothing is copied."""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
    if data is None:
        return ends - ends[0], np.zeros(0, np.uint8)
    return ends - ends[0], np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def join_parts(parts: Sequence[pa.Array | pa.Scalar], num_rows: int) -> pa.LargeBinaryArray:
    """Concatenate the parts of every row; a constant is the same in all rows."""
    merged: list[pa.Array | pa.Scalar] = []
    for part in parts:
        if merged and isinstance(part, pa.Scalar) and isinstance(merged[-1], pa.Scalar):
            merged[-1] = constant(merged[-1].as_py() + part.as_py())
        else:
            merged.append(part)
    if isinstance(merged[0], pa.Scalar) and len(merged) == 1:
        return pa.array([merged[0].as_py()] * num_rows, BINARY)
    return pc.binary_join_element_wise(*merged, constant(b""))


def constant(text: bytes) -> pa.Scalar:
    """A part that is the same in all rows."""
    return pa.scalar(text, BINARY)


def fixed(
    tag: bytes, values: npt.NDArray[np.generic], present: npt.NDArray[np.bool_] | None
) -> pa.LargeBinaryArray:
    """Tag and little-endian bytes of every value; nothing where it is not present."""
    kept = values if present is None else values[present]
    width = len(tag) + kept.itemsize
    table = np.empty((len(kept), width), np.uint8)
    table[:, : len(tag)] = np.frombuffer(tag, np.uint8)
    table[:, len(tag) :] = np.ascontiguousarray(kept).view(np.uint8).reshape(-1, kept.itemsize)
    if present is None:
        return from_offsets(np.arange(len(values) + 1, dtype=np.int64) * width, table.reshape(-1))
    return binary_array(table.reshape(-1), present.astype(np.int64) * width)


def tagged_varints(
    tag: bytes, values: Integers, present: npt.NDArray[np.bool_]
) -> pa.LargeBinaryArray:
    """Tag and varint of every value; nothing where it is not present."""
    table, lengths = _varints(values, tag)
    lengths *= present
    return binary_array(table[np.arange(table.shape[1]) < lengths[:, None]], lengths)


def _varints(values: Integers, tag: bytes) -> tuple[Bytes, Integers]:
    """One row of bytes for each value, padded to the right, and how many of them count."""
    rest = values.astype(np.int64).view(np.uint64)
    lengths = np.ones(len(values), np.int64)
    longest = 1
    while longest < 10 and (more := rest >= np.uint64(1 << 7 * longest)).any():
        lengths += more
        longest += 1
    table = np.empty((len(values), len(tag) + longest), np.uint8)
    table[:, : len(tag)] = np.frombuffer(tag, np.uint8)
    for place in range(longest):
        group = (rest >> np.uint64(7 * place)).astype(np.uint8) & np.uint8(0x7F)
        table[:, len(tag) + place] = group | (lengths > place + 1).astype(np.uint8) << 7
    return table, lengths + len(tag)


def delimited(tag: bytes, column: pa.Array) -> pa.LargeBinaryArray:
    """Tag, length and bytes of every value; nothing where it is null."""
    data = pc.cast(column, BINARY)
    lengths = pc.fill_null(pc.binary_length(data), 0).to_numpy(zero_copy_only=False)
    heads = tagged_varints(tag, lengths, present_rows(column))
    return join_parts(
        [heads, data if not data.null_count else pc.fill_null(data, b"")], len(column)
    )


def from_offsets(offsets: Integers, data: Bytes) -> pa.LargeBinaryArray:
    """Array whose row `i` is `data[offsets[i]:offsets[i + 1]]`; the bytes are not copied."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.LargeBinaryArray.from_buffers(BINARY, len(offsets) - 1, buffers)


def present_rows(column: pa.Array) -> npt.NDArray[np.bool_]:
    """True where a row is not null."""
    valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid
