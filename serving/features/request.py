"""What a request names, checked before anything is read, and its columns as model inputs after.

`DatasetSchema.model_inputs` makes inputs of data frames, column by column through pandas: a
millisecond for one row of a hundred columns. Here the same rules work on columns as online reads
give them, and give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadRequestError, TooLargeError
from serving.features.recipe import Recipe
from tasks.contracts.data import DatasetSchema, category_code


def checked_columns(
    recipe: Recipe, entities: Mapping[str, Sequence[Any]], max_rows: int
) -> tuple[dict[str, list[Any]], int]:
    """Columns of a request as lists of plain values, and its rows.

    Raises:
        BadRequestError: a column is absent or unknown, or lengths differ.
        TooLargeError: it has more rows than one read takes.
    """
    keys, expected = recipe.keys, {*recipe.keys, *recipe.request_columns}
    if missing := sorted(keys - entities.keys()):
        raise BadRequestError(
            f"the request has no key column {', '.join(missing)}; {recipe.model} is read by "
            f"{', '.join(sorted(keys))}, and the request has "
            f"{', '.join(map(str, entities)) or 'none'}. Nothing was read"
        )
    if unknown := sorted(map(str, entities.keys() - expected)):
        raise BadRequestError(
            f"the request has column {', '.join(unknown)}, which is no key of {recipe.model} and "
            f"no input that a request gives; expected {', '.join(sorted(expected))}. Nothing was "
            "read"
        )
    if lacking := [name for name in recipe.request_columns if name not in entities]:
        raise BadRequestError(
            f"the request lacks column {', '.join(lacking)}: no feature view holds these inputs of "
            f"{recipe.model}, so a request gives them beside its keys. Nothing was read"
        )
    columns = {name: _plain(name, values) for name, values in entities.items()}
    return columns, _num_rows(columns, max_rows)


def _num_rows(columns: Mapping[str, list[Any]], most: int) -> int:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise BadRequestError(
            "the columns of the request differ in length: "
            f"{', '.join(f'{name} has {rows}' for name, rows in lengths.items())}. Nothing was read"
        )
    num_rows = next(iter(lengths.values()), 0)
    if num_rows == 0:
        raise BadRequestError("the request names no entity; expected one a row. Nothing was read")
    if num_rows > most:
        raise TooLargeError(
            f"the request names {num_rows} entities, expected at most {most}; send it in parts. "
            "Nothing was read"
        )
    return num_rows


def _plain(name: str, values: Any) -> list[Any]:
    """A column as Python values; text that came as bytes is UTF-8."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise BadRequestError(
                f"column {name} has shape {values.shape}, expected one value a row. Nothing was "
                "read"
            )
        values = values.tolist()
    elif isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise BadRequestError(
            f"column {name} is one {type(values).__name__}, expected a list with one value a row. "
            "Nothing was read"
        )
    return [_text(name, value) if isinstance(value, bytes) else value for value in values]


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as exc:
        raise BadRequestError(
            f"column {name} holds {value[:40]!r}, which is no UTF-8. Nothing was read"
        ) from exc


_code = lru_cache(65_536)(category_code)
Column = Sequence[Any] | NDArray[Any]


def build_inputs(
    schema: DatasetSchema, columns: Mapping[str, Column], num_rows: int
) -> dict[str, NDArray[Any]]:
    """The arrays `categorical` (int32) and `numeric` (float32), rows first.

    Args:
        schema: raw columns in the model's order.
        columns: by name, one entry a row; None and NaN are missing. A column that is absent is
            missing in every row.
        num_rows: of every column.

    Raises:
        BadRequestError: a value is no number where the model takes one.
    """
    codes = np.zeros((num_rows, len(schema.categorical)), np.int32)
    for position, name in enumerate(schema.categorical):
        if (values := columns.get(name)) is not None:
            codes[:, position] = [_category(value) for value in values]
    numbers = np.full((num_rows, len(schema.numeric)), np.nan, np.float32)
    for position, name in enumerate(schema.numeric):
        values = columns.get(name)
        if isinstance(values, np.ndarray):
            numbers[:, position] = values
        elif values is not None:
            numbers[:, position] = _numbers(name, values)
    return {"categorical": codes, "numeric": numbers}


def _category(value: Any) -> int:
    if type(value) is str:
        return _code(value)
    return 0 if value is None or value != value else _code(str(value))


def _numbers(name: str, values: Column) -> NDArray[Any]:
    try:
        plain = np.array([np.nan if value is None else value for value in values])
        if plain.dtype.kind not in "fiub":  # text would be read as a number
            raise TypeError(plain.dtype)
        with np.errstate(over="ignore"):  # beyond 32 bits is infinite, as in training
            return plain.astype(np.float32)
    except (TypeError, ValueError, OverflowError) as exc:
        bad = next((v for v in values if isinstance(v, bool | str | bytes | list | dict)), values)
        raise BadRequestError(
            f"column {name} holds {bad!r}, expected a number or null in every row. Nothing was "
            "computed"
        ) from exc
