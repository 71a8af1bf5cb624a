"""A training state taken apart into tensors and all the rest, and put together again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tasks.kernel.errors import ArtifactError, TrainingError

# Plain values and tensors only, in dicts, lists and tuples.
State = dict[str, Any]

Keys = tuple[str | int, ...]
"""Where in a state a tensor is: keys of dicts and positions in lists, from the outside in."""

MAX_DEPTH = 64
"""Of containers in each other, and of a tensor's dimensions: more than any training needs."""

# The plain part of a state travels as bytes, under no keys.
PLAIN_KEYS: Keys = ()
PLAIN_DTYPE = "U8"
# By the names of the safetensors format.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (self.num_rows, *self.values.shape[1:])

    @property
    def start(self) -> int:
        """Elements of the whole tensor before these rows."""
        return self.first_row * self.values[:1].numel() if len(self.values) else 0


Leaf = Tensor | TensorRows


@dataclass(frozen=True)
class TakenApart:
    """A state as a checkpoint holds it."""

    plain: Any
    """The state with None in place of each tensor; shares no container with it."""
    tensors: dict[Keys, Leaf]

    def values(self) -> dict[Keys, Tensor]:
        """The tensors, of cut ones the rows that are here."""
        return {
            keys: leaf.values if isinstance(leaf, TensorRows) else leaf
            for keys, leaf in self.tensors.items()
        }

    def with_tensors(self, change: Callable[[Keys, Tensor], Tensor]) -> TakenApart:
        """The same with other tensors in place of these."""
        changed: dict[Keys, Leaf] = {}
        for keys, leaf in self.tensors.items():
            if isinstance(leaf, TensorRows):
                values = change(keys, leaf.values)
                changed[keys] = TensorRows(values, leaf.first_row, leaf.num_rows)
            else:
                changed[keys] = change(keys, leaf)
        return TakenApart(self.plain, changed)


def take_apart(state: Mapping[str, Any]) -> TakenApart:
    """Separate the tensors of a state from the rest.

    Raises:
        TrainingError: a tensor is of a kind, or has a name, that a checkpoint cannot hold.
    """
    tensors: dict[Keys, Leaf] = {}
    plain = _plain(state, (), tensors)
    if len({name_of(keys) for keys in tensors}) < len(tensors):
        raise TrainingError(
            "two tensors of the training state have the same name; expected keys without a slash, "
            "and no text beside an equal number. No checkpoint was written"
        )
    return TakenApart(plain, tensors)


def _plain(value: Any, keys: Keys, tensors: dict[Keys, Leaf]) -> Any:
    if isinstance(value, Tensor):
        tensors[keys] = _checked(value, keys)
        return None
    if isinstance(value, TensorRows):
        values = _checked(value.values, keys)
        tensors[keys] = TensorRows(values, value.first_row, value.num_rows)
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item, (*keys, key), tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, (*keys, index), tensors) for index, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(_plain(item, (*keys, index), tensors) for index, item in enumerate(value))
    return value


def _checked(tensor: Tensor, keys: Keys) -> Tensor:
    """The tensor without its history, on whatever device it is."""
    has_names = all(isinstance(key, str | int) and not isinstance(key, bool) for key in keys)
    if not has_names or len(keys) > MAX_DEPTH:
        raise TrainingError(
            f"a tensor of the training state is under {name_of(keys)}; expected at most "
            f"{MAX_DEPTH} keys that are text or whole numbers. No checkpoint was written"
        )
    is_plain = type(tensor) in {Tensor, nn.Parameter} and tensor.layout == torch.strided
    if not is_plain or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        raise TrainingError(
            f"{name_of(keys)} is a {type(tensor).__name__} of {tensor.dtype} with layout "
            f"{tensor.layout}; expected a plain dense tensor of {', '.join(DTYPES)} (of a tensor "
            "that is cut over ranks: its rows). No checkpoint was written"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def put_together(plain: Any, tensors: Mapping[Keys, Tensor | None]) -> State:
    """Put each tensor into its place, in the plain part of a state that `take_apart` gave.

    Dicts get the keys that they lack, for tensors that only other ranks have. A tensor that is None
    is left out: its key is absent from a dict, and None in a list or tuple.

    Raises:
        ArtifactError: a tensor has no place in `plain`.
    """
    try:
        state: State = _merged(plain, _branches(tensors))
    except (LookupError, TypeError, ValueError, RecursionError) as exc:
        raise ArtifactError(f"a tensor has no place in the state ({exc!r})") from exc
    return state


def _branches(tensors: Mapping[Keys, Tensor | None]) -> dict[str | int, Any]:
    """Nested dicts with the tensors as their leaves."""
    branches: dict[str | int, Any] = {}
    for keys, tensor in tensors.items():
        branch = branches
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise TypeError(f"{name_of(keys)} is inside another tensor")
        branch[keys[-1]] = tensor
    return branches


def _merged(value: Any, branches: dict[str | int, Any]) -> Any:
    """`value`, a container, with what `branches` holds for its places."""
    if not isinstance(value, Mapping | list | tuple):
        raise TypeError(f"{type(value).__name__} is no container")
    is_dict = isinstance(value, Mapping)
    items = dict(value) if is_dict else dict(enumerate(value))
    for key, branch in branches.items():
        if not is_dict and key not in items:
            raise IndexError(key)
        if isinstance(branch, dict):
            items[key] = _merged(items.get(key, {}), branch)
        elif branch is None and is_dict:
            items.pop(key, None)
        else:
            items[key] = branch
    if isinstance(value, Mapping):
        return items
    return type(value)(items.values())


def name_of(keys: Keys) -> str:
    """A tensor's name: its keys with a slash between them."""
    return "/".join(map(str, keys))


def is_named(keys: Keys, names: Collection[str] | None) -> bool:
    """True where a tensor is one of `names`, or below one; None names all."""
    if names is None:
        return True
    return any(name_of(keys[:depth]) in names for depth in range(1, len(keys) + 1))


def serialized(state: Mapping[str, Any]) -> bytes:
    """The bytes of a file of `torch.save`.

    In memory first: torch reports a full disk as a RuntimeError without a reason.
    """
    content = io.BytesIO()
    torch.save(dict(state), content)
    return content.getvalue()


def plain_to_bytes(plain: Any) -> bytes:
    """The plain part of a state as a file of `torch.save`.

    Raises:
        TrainingError: it holds what could not be loaded again.
    """
    content = io.BytesIO()
    try:
        torch.save(plain, content)
        plain_from_bytes(content.getvalue())
    except (pickle.PicklingError, AttributeError, TypeError, ArtifactError) as exc:
        raise TrainingError(
            "the training state holds what a checkpoint must not hold; expected tensors, numbers, "
            f"text, None, and dicts, lists and tuples of them. No checkpoint was written ({exc})"
        ) from exc
    return content.getvalue()


def plain_from_bytes(content: bytes) -> Any:
    """What `plain_to_bytes` was given; no code is run.

    Raises:
        ArtifactError: it is something else.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else repr(exc)
        raise ArtifactError(f"the plain part of the state cannot be loaded ({reason})") from exc
