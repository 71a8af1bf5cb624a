"""How a network is cut over ranks: what needs no torch.distributed to be said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Cut = Literal["outputs", "inputs", "units"]
"""How a module is cut: a linear layer by outputs or by inputs, a dropout by the units it meets."""


def cut_evenly(sizes: Sequence[int], num_parts: int) -> list[slice]:
    """Cut blocks into parts that follow each other, the largest as small as can be.

    Args:
        sizes: size of each block, such as its parameters.
        num_parts: parts; none is empty, so there must be at least as many blocks.

    Returns:
        The blocks of each part.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:  # the smallest bound under which the parts are enough
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    starts = _filled(sizes, low)
    # Where fewer parts are enough, blocks that share one are set apart from behind.
    free = [block for block in reversed(range(len(sizes))) if block not in starts]
    starts = sorted([*starts, *free[: num_parts - len(starts)]])
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _filled(sizes: Sequence[int], bound: int) -> list[int]:
    """First blocks of the parts that come from filling each up to `bound`."""
    starts, filled = [0], 0
    for block, size in enumerate(sizes):
        if filled + size > bound:
            starts.append(block)
            filled = 0
        filled += size
    return starts
