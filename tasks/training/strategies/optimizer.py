"""What all strategies step with: gradients in one buffer, a named optimizer, mixed precision.

Mixed precision is after Micikevicius et al., "Mixed Precision Training" (2017): weights, the sums
over ranks and the optimizer stay in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tasks.kernel.errors import TrainingError
from tasks.training.strategies.base import OptimizerBuilder, State
from tasks.training.strategies.config import Precision

SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_LOSS_SCALE = 2.0**24
OfParameter = Callable[[str, Tensor], Tensor]
"""(parameter's name, tensor of its shape): makes a whole tensor of what a rank holds, or cuts what
a rank holds out of a whole one."""


def as_it_is(_: str, tensor: Tensor) -> Tensor:
    """For ranks that hold whole parameters."""
    return tensor


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.detach().cpu().clone()


class FlatGradients:
    """Gradients of all parameters as views of one tensor, so that one collective a step is enough.

    Args:
        parameters: of one type and on one device.

    Raises:
        TrainingError: there is nothing to train.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        if not trained:
            raise TrainingError("the network has no parameter to train; expected at least one")
        first = trained[0][1]
        sizes = [p.numel() for _, p in trained]
        self.flat = torch.zeros(sum(sizes), device=first.device, dtype=first.dtype)
        self.views: dict[str, Tensor] = {}
        for (name, parameter), part in zip(trained, torch.split(self.flat, sizes), strict=True):
            self.views[name] = parameter.grad = part.view_as(parameter)

    def views_of(self, flat: Tensor) -> dict[str, Tensor]:
        """Parts of another buffer of the same layout, by name and in shape."""
        parts = torch.split(flat, [view.numel() for view in self.views.values()])
        named = zip(self.views.items(), parts, strict=True)
        return {name: part.view_as(view) for (name, view), part in named}


def ring_bytes(num_bytes: int, size: int) -> int:
    """Bytes that each of `size` ranks sends in a ring allreduce of a buffer of `num_bytes`."""
    return 2 * num_bytes * (size - 1) // size


class NamedOptimizer:
    """An optimizer whose state is known by the names of its parameters, not by their numbers."""

    def __init__(
        self, build: OptimizerBuilder, parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        named = list(parameters)
        self._names = {id(parameter): name for name, parameter in named}
        self._optimizer = build(named)

    def step(self, learning_rate: float) -> None:
        """Move the parameters along their gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def _parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order in which the optimizer numbers them."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _entries(self) -> Iterator[tuple[nn.Parameter, str, Any]]:
        for parameter in self._parameters():
            for field, value in self._optimizer.state.get(parameter, {}).items():
                yield parameter, field, value

    def tensors(self) -> list[Tensor]:
        """What this rank holds of state with a parameter's shape, such as Adam's moments."""
        return [value for parameter, _, value in self._entries() if _has_shape(parameter, value)]

    def state(self, to_plain: OfParameter = as_it_is) -> State:
        """Maps "name/field" to tensors and numbers on the CPU; copies.

        Args:
            to_plain: makes a tensor of a parameter's shape whole.
        """
        plain: State = {}
        for parameter, field, value in self._entries():
            name = self._names[id(parameter)]
            if isinstance(value, Tensor):
                value = on_host(to_plain(name, value) if _has_shape(parameter, value) else value)
            plain[f"{name}/{field}"] = value
        return plain

    def load(self, plain: State, from_plain: OfParameter = as_it_is) -> None:
        """Take over what `state` gave, of any strategy.

        Args:
            plain: with whole tensors.
            from_plain: cuts this rank's part out of a tensor of a parameter's shape.
        """
        parameters = {self._names[id(p)]: (n, p) for n, p in enumerate(self._parameters())}
        numbered: dict[int, dict[str, Any]] = {}
        for key, value in plain.items():
            name, _, field = key.rpartition("/")
            if name not in parameters:
                continue
            number, parameter = parameters[name]
            if isinstance(value, Tensor):
                held = from_plain(name, value) if _has_shape(parameter, value) else value
                # The optimizer changes its state in place, and the caller keeps the checkpoint's.
                value = held.clone()
            numbered.setdefault(number, {})[field] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _has_shape(parameter: nn.Parameter, value: object) -> bool:
    """True for state of the parameter's shape; false for counts such as Adam's step."""
    return isinstance(value, Tensor) and (value.ndim > 0 or parameter.ndim == 0)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which the network runs: products in 16 bits where `precision` asks for it."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=SIXTEEN_BITS[precision])


@dataclass
class LossScale:
    """The factor of the loss that keeps small fp16 gradients from becoming zero; else 1.

    The rule of `torch.amp.GradScaler`, but judged on the gradient of all ranks, so that all of them
    skip the same steps: halved when a gradient overflows, doubled after many that did not.
    """

    factor: float
    clean_steps: int = 0
    growth_steps: int = 2000

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """That of the first step."""
        return cls(2.0**16 if precision == "fp16" else 1.0)

    def after_overflow(self) -> None:
        """The step is skipped; try the next one with half the scale."""
        self.factor, self.clean_steps = self.factor / 2, 0

    def after_step(self) -> None:
        """The gradient was in range."""
        self.clean_steps += 1
        if self.clean_steps >= self.growth_steps:
            self.factor, self.clean_steps = min(2 * self.factor, MAX_LOSS_SCALE), 0

    def state(self) -> State:
        """What a checkpoint keeps."""
        return {"loss_scale": self.factor, "clean_steps": self.clean_steps}

    def load(self, state: State) -> None:
        """Take over a checkpoint's scale; one that was written without any leaves this as it is."""
        self.factor = float(state.get("loss_scale", self.factor))
        self.clean_steps = int(state.get("clean_steps", 0))
