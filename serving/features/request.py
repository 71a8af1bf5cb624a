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
    """Columns of a request and its rows.

    Args:
        recipe: of the version that answers.
        entities: columns of one length, texts and numbers, as the protocol has checked.
        max_rows: of one read.

    Raises:
        BadRequestError: a column is absent or unknown.
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
    num_rows = len(next(iter(entities.values())))
    if num_rows > max_rows:
        raise TooLargeError(
            f"the request names {num_rows} entities, expected at most {max_rows}; send fewer in "
            "one request. Nothing was read"
        )
    return {name: list(values) for name, values in entities.items()}, num_rows


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
