"""Small training states for the tests of checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.training.checkpoints.disk import Disk
from tasks.training.checkpoints.store import CheckpointRef, CheckpointStore
from tasks.training.strategies.base import State


def store_in(folder: Path) -> CheckpointStore:
    return CheckpointStore(Disk(folder))


def state_after(epoch: int, rows: int = 40) -> State:
    """A state with tensors of several kinds; each epoch's is another."""
    weight = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) + epoch
    return {
        "epoch": epoch,
        "step": 0,
        "network": {
            "layer.weight": weight,
            "layer.bias": torch.full((3,), float(epoch), dtype=torch.bfloat16),
            "seen": torch.tensor(epoch),
        },
        "optimizer": {"layer.weight/exp_avg": torch.ones(rows, 3) * epoch, "step": 7.0},
        "strategy": {"scale": 65536.0, "mask": torch.tensor([True, False]), "none": None},
        "history": [{"epoch": e, "loss": 0.5} for e in range(epoch)],
        "best_weights": {"layer.weight": weight},
    }


def assert_equal(seen: Any, expected: Any) -> None:
    """Two states are equal, tensors to the last bit, and have the same containers."""
    assert type(seen) is type(expected)
    if isinstance(expected, Tensor):
        assert (seen.dtype, seen.shape) == (expected.dtype, expected.shape)
        assert torch.equal(_bits(seen), _bits(expected))
    elif isinstance(expected, dict):
        assert list(seen) == list(expected)
        assert_equal(list(seen.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(seen) == len(expected)
        for item, value in zip(seen, expected, strict=True):
            assert_equal(item, value)
    else:
        assert seen == expected or (seen != seen and expected != expected)


def _bits(tensor: Tensor) -> Tensor:
    contiguous = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return contiguous.view(-1).view(torch.uint8)


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def save_epochs(store: CheckpointStore, *epochs: int) -> list[CheckpointRef]:
    """Save the state after each of some epochs."""
    return [store.save(epoch, 0, state_after(epoch)) for epoch in epochs]
