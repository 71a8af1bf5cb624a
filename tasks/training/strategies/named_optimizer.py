"""An optimizer whose state is known by the names of its parameters, not by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tasks.training.checkpoints.state import TensorRows
from tasks.training.strategies.base import OptimizerBuilder, State

Describe = Callable[[str, Tensor], Tensor | TensorRows]
"""(parameter's name, state tensor of its shape as a rank holds it) to how a state has it."""
ToPlain = Callable[[str, Tensor], Tensor]
"""(parameter's name, state tensor of its shape as a rank holds it) to the whole one."""
FromPlain = Callable[[str, Tensor], Tensor]
"""(parameter's name, whole state tensor of its shape) to what this rank holds of it."""


def as_it_is(_: str, tensor: Tensor) -> Tensor:
    """For ranks that hold whole parameters."""
    return tensor


def on_host(described: Tensor | TensorRows) -> Tensor | TensorRows:
    """A copy in host memory."""
    if isinstance(described, TensorRows):
        rows = described.values.detach().cpu().clone()
        return TensorRows(rows, described.first_row, described.num_rows)
    return described.detach().cpu().clone()


class NamedOptimizer:
    """An optimizer of named parameters.

    Args:
        build: makes the optimizer.
        parameters: what this rank steps.
        to_plain: makes a state tensor whole; collective where ranks hold parts.
        from_plain: cuts this rank's part out of a whole state tensor.
    """

    def __init__(
        self,
        build: OptimizerBuilder,
        parameters: Iterable[tuple[str, nn.Parameter]],
        to_plain: ToPlain = as_it_is,
        from_plain: FromPlain = as_it_is,
    ) -> None:
        named = list(parameters)
        self._names = {id(parameter): name for name, parameter in named}
        self._optimizer = build(named)
        self._to_plain = to_plain
        self._from_plain = from_plain

    def step(self, learning_rate: float) -> None:
        """Move the parameters along their gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def _parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order in which the optimizer numbers them."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def tensors(self) -> list[Tensor]:
        """What this rank holds of state with a parameter's shape, such as Adam's moments."""
        return [
            value
            for parameter in self._parameters()
            for value in self._optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and (value.ndim > 0 or parameter.ndim == 0)
        ]

    def state(self, describe: Describe | None = None) -> State:
        """Maps "name/field" to tensors and numbers on the CPU; copies.

        Args:
            describe: what is to stand for a state tensor of a parameter's shape; none: the whole.
        """
        describe = describe or self._to_plain
        plain: State = {}
        for parameter in self._parameters():
            name = self._names[id(parameter)]
            for field, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    is_part = value.ndim > 0 or parameter.ndim == 0
                    value = on_host(describe(name, value) if is_part else value)
                plain[f"{name}/{field}"] = value
        return plain

    def load(self, plain: State) -> None:
        """Take over what `state` gave, of any strategy."""
        by_name: dict[str, dict[str, Any]] = {}
        for key, value in plain.items():
            name, _, field = key.rpartition("/")
            by_name.setdefault(name, {})[field] = value
        numbered: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(self._parameters()):
            name = self._names[id(parameter)]
            if name in by_name:
                numbered[number] = {
                    field: self._held(name, parameter, value)
                    for field, value in by_name[name].items()
                }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    def _held(self, name: str, parameter: nn.Parameter, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        is_part = value.ndim > 0 or parameter.ndim == 0
        # A copy: the optimizer changes its state in place, and the caller keeps the checkpoint's.
        return self._from_plain(name, value).clone() if is_part else value.clone()


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, float32 scalar."""
    return torch.nn.utils.get_total_norm(gradients)
