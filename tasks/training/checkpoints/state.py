"""A training state as a checkpoint holds it: plain values and tensors, in dicts, lists, tuples.

It is written as a file of `torch.save` and loaded without running any code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.kernel.errors import ArtifactError, TrainingError

State = dict[str, Any]
# Keys of the dict that stands for some rows of a tensor in a rank's file.
ROWS, FIRST_ROW, NUM_ROWS = "rows of a tensor", "first row", "rows of the whole"


@dataclass(frozen=True)
class TensorRows:
    """Consecutive rows of a tensor of which other ranks hold the rest.

    Args:
        values: the rows, shape (rows, ...); may be none.
        first_row: where they are in the whole tensor.
        num_rows: rows of the whole tensor.
    """

    values: Tensor
    first_row: int
    num_rows: int


def to_host(value: Any, *, copy: bool, known: dict[int, Tensor] | None = None) -> Any:
    """The same in host memory, with containers that nobody else changes.

    Args:
        value: a state, or what is in one.
        copy: tensors that nobody else changes too.
        known: tensors that were met before; one that is in the state twice is copied once.
    """
    known = {} if known is None else known
    if isinstance(value, TensorRows):
        rows = to_host(value.values, copy=copy, known=known)
        return {ROWS: rows, FIRST_ROW: value.first_row, NUM_ROWS: value.num_rows}
    if isinstance(value, Tensor):
        if id(value) not in known:
            # A file of `torch.save` holds all of what a view is of.
            is_view = value.nbytes < value.untyped_storage().nbytes()
            known[id(value)] = value.detach().to("cpu", copy=copy or is_view)
        return known[id(value)]
    if isinstance(value, Mapping):
        return {key: to_host(item, copy=copy, known=known) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(to_host(item, copy=copy, known=known) for item in value)
    return value


def own_rows(value: Any) -> Any:
    """Of a state from `to_host` what no other rank has: the rows of tensors that are cut."""
    if not isinstance(value, dict) or ROWS in value:
        return value
    rows = {key: own_rows(item) for key, item in value.items() if isinstance(item, dict)}
    return {key: item for key, item in rows.items() if item}


def joined(of_ranks: Sequence[Any]) -> Any:
    """One state of what each rank wrote; what several wrote complete is the first one's.

    Raises:
        ArtifactError: the rows of a tensor do not make a whole.
    """
    first = of_ranks[0]
    if not isinstance(first, dict):
        return first
    if ROWS in first:
        return _whole_tensor(of_ranks)
    keys = dict.fromkeys(key for of_rank in of_ranks for key in of_rank)
    return {key: joined([of_rank[key] for of_rank in of_ranks if key in of_rank]) for key in keys}


def _whole_tensor(of_ranks: Sequence[dict[str, Any]]) -> Tensor:
    parts = sorted(of_ranks, key=lambda part: (part[FIRST_ROW], len(part[ROWS])))
    end = 0
    for part in parts:
        if len(part[ROWS]) and part[FIRST_ROW] != end:
            raise ArtifactError(f"rows {end} to {part[FIRST_ROW]} of a tensor are not there once")
        end += len(part[ROWS])
    if end != parts[0][NUM_ROWS]:
        raise ArtifactError(f"a tensor has {end} of its {parts[0][NUM_ROWS]} rows")
    return torch.cat([part[ROWS] for part in parts])


def serialized(state: Mapping[str, Any]) -> bytes:
    """The content of a file of `torch.save`.

    In memory first: torch reports a full disk as a RuntimeError without a reason.
    """
    content = io.BytesIO()
    torch.save(dict(state), content)
    return content.getvalue()


def checked(state: Mapping[str, Any]) -> bytes:
    """As `serialized`, of what can be loaded again without running code.

    Raises:
        TrainingError: the state holds something else.
    """
    try:
        content = serialized(state)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError) as exc:
        unsafe = [str(exc)]
    if unsafe:
        raise TrainingError(
            "the training state holds what a checkpoint must not hold; expected tensors, numbers, "
            "text, None, and dicts, lists and tuples of them. No checkpoint was written "
            f"({', '.join(unsafe)})"
        )
    return content


def deserialized(content: bytes) -> Any:
    """What `checked` was given; no code is run.

    Raises:
        ArtifactError: it is something else.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else repr(exc)
        raise ArtifactError(f"it cannot be loaded ({reason})") from exc
