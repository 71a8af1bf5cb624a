"""Rows of a Parquet file as arrays of a program's inputs: a column an input, of nested lists."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tasks.contracts.conversion import BATCH_AXIS, Signature, TensorSpec
from tasks.conversion.inputs import SEED, Array, ModelInputs
from tasks.kernel.errors import DataContractError

EDGE_ROWS = 64
EDGE_CALLS = (1, 2, 7, 64)


def read_inputs(table: pa.Table, signature: Signature) -> ModelInputs:
    """The inputs of a signature from the columns of a table, same rows in the same order.

    A column bears the name of its input and holds what one row of it is: a number, or a list, as
    deep as the input has axes after the first; a flat list will do where these are all fixed. An
    input whose `columns` are named is read from columns of these names instead.

    Raises:
        DataContractError: a column is absent, has nulls, is no number, or another shape.
    """
    arrays: dict[str, Array] = {}
    axes: dict[str, int] = {}
    for spec in signature.inputs:
        array = _read(table, spec)
        for axis, length in zip(spec.shape[1:], array.shape[1:], strict=True):
            expected = axes.setdefault(axis, length) if isinstance(axis, str) else axis
            most = signature.largest.get(str(axis), length)
            if length != expected or length > most:
                raise DataContractError(
                    f"the rows have {list(array.shape[1:])} values of {spec.name!r} each, the "
                    f"program takes {list(spec.shape[1:])} ({dict(signature.largest)} at most)"
                )
        arrays[spec.name] = array
    return ModelInputs(arrays)


def _read(table: pa.Table, spec: TensorSpec) -> Array:
    if spec.columns and not set(spec.columns) - set(table.column_names):
        stacked = np.stack([_numbers(table, name)[0] for name in spec.columns], axis=1)
        return _typed(stacked, spec)
    values, lengths = _numbers(table, spec.name)
    fixed = tuple(axis for axis in spec.shape[1:] if isinstance(axis, int))
    inner = spec.shape[1:]
    if len(fixed) == len(inner) and lengths == (int(np.prod(fixed)),):
        lengths = fixed
    if len(lengths) != len(inner):
        raise DataContractError(
            f"column {spec.name!r} holds {list(lengths)} numbers a row, the program takes "
            f"{list(inner)}; nest the lists as the program's axes are"
        )
    return _typed(values.reshape(table.num_rows, *lengths), spec)


def _typed(values: NDArray[np.generic], spec: TensorSpec) -> Array:
    """The numbers in the type that the program takes; whole ones are not made of others."""
    with np.errstate(invalid="ignore"):  # of numbers that are no whole ones: compared below
        typed = np.ascontiguousarray(values, dtype=spec.dtype)
    if np.issubdtype(typed.dtype, np.integer) and not np.array_equal(typed, values):
        wrong = values[typed != values].flat[0]
        raise DataContractError(
            f"the rows of {spec.name!r} hold {wrong}, and the program takes whole numbers "
            f"({spec.dtype}); write what it takes into the Parquet file"
        )
    return typed


def _numbers(table: pa.Table, name: str) -> tuple[NDArray[np.generic], tuple[int, ...]]:
    """All numbers of a column in one row, and how long its lists are, from outer to inner."""
    if name not in table.column_names:
        raise DataContractError(
            f"the prepared rows have the columns {', '.join(table.column_names)}, expected "
            f"{name!r} with what the program takes of each row"
        )
    column = table[name].combine_chunks()
    lengths: list[int] = []
    while _is_list(column.type):
        found = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(found) != 1 or found[0] is None:
            raise DataContractError(
                f"the lists of column {name!r} have {len(found)} different lengths, or are absent "
                "in some rows; rows are compared side by side, so make them equally long"
            )
        lengths.append(int(found[0]))
        column = column.flatten()
    if column.null_count or not _is_number(column.type):
        raise DataContractError(
            f"column {name!r} holds {column.type} with {column.null_count} nulls, expected numbers "
            "without; what is missing has to be said as the program expects it"
        )
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return column.to_numpy(zero_copy_only=False), tuple(lengths)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_fixed_size_list(kind) or types.is_large_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def edge_calls(inputs: ModelInputs, most_rows: int) -> tuple[ModelInputs, ...]:
    """Rows that data rarely holds, in calls of several sizes.

    The least and the greatest value of each place, places of different rows put together, and the
    rows backwards: all within what was seen, for a program may know no other value.

    Args:
        inputs: ordinary rows.
        most_rows: of a call.
    """
    rng = np.random.default_rng(SEED)
    mixed = {name: _mixed(array, rng) for name, array in inputs.items()}
    rows = ModelInputs(mixed)
    return tuple(rows.block(0, size) for size in EDGE_CALLS if size <= most_rows)


def _mixed(array: Array, rng: np.random.Generator) -> Array:
    flat = array.reshape(len(array), -1)
    rows = rng.integers(0, len(flat), (EDGE_ROWS, flat.shape[1]))
    made = np.take_along_axis(flat, rows, axis=0)
    made[0::4], made[1::4] = flat.min(axis=0), flat.max(axis=0)
    return np.ascontiguousarray(made.reshape(EDGE_ROWS, *array.shape[1:]))


def most_rows_of(signature: Signature) -> int:
    """Rows that a call of the program may have."""
    return signature.largest.get(BATCH_AXIS, EDGE_ROWS * 16)
