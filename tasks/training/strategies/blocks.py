"""The big blocks of a network: what is computed again, or cut over ranks, as one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The members of the network's outermost module lists, and its other parts with parameters.

    A transformer gives its layers, embedding and head; a network without lists its direct parts.
    """
    return list(_blocks(network))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        if _has_list(child):
            yield from _blocks(child)
        elif _can_be_called(child):
            yield child


def _has_list(module: nn.Module) -> bool:
    """True where a list of modules with parameters is in `module`, or is it."""
    return any(
        isinstance(part, nn.ModuleList) and next(part.parameters(), None) is not None
        for part in module.modules()
    )


def _can_be_called(module: nn.Module) -> bool:
    """False for containers such as ParameterList, whose owner does the computing."""
    return type(module).forward is not nn.Module.forward


def checkpoint_activations(network: nn.Module) -> None:
    """Let each block compute its activations again in the backward pass instead of keeping them.

    Names of parameters stay as they are, and so does what is computed in evaluation.
    """
    for block in blocks_of(network):
        kind = type(block)
        block.__class__ = type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {})


class _Recomputed(nn.Module):
    """Mixed into a block's own class, so that a copy of the block computes with its own weights."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """What the block computes."""
        if not self.training:
            return super().forward(*arguments, **options)
        return checkpoint(super().forward, *arguments, use_reentrant=False, **options)
