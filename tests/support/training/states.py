"""Small training states for the tests of checkpoints."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.training.checkpoints.manifest import CheckpointRef
from tasks.training.checkpoints.parts import Reader
from tasks.training.checkpoints.places import LocalPlace
from tasks.training.checkpoints.state import State
from tasks.training.checkpoints.store import CheckpointStore

SHARD_BYTES = 256


def store_in(folder: Path, shard_bytes: int = SHARD_BYTES) -> CheckpointStore:
    """A store on the disk that cuts even small states."""
    return CheckpointStore(LocalPlace(folder), shard_bytes)


class MemoryPlace:
    """A place that is quick enough for thousands of checkpoints."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def list_files(self) -> set[str]:
        return set(self._files)

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        self._files[name] = b"".join(chunks)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        if name not in self._files:
            raise FileNotFoundError(name)
        yield io.BytesIO(self._files[name])

    def in_use(self, folder: str) -> AbstractContextManager[None]:
        return nullcontext()

    def remove(self, folder: str) -> bool:
        for name in [name for name in self._files if name.startswith(f"{folder}/")]:
            del self._files[name]
        return True


def store_in_memory(shard_bytes: int = SHARD_BYTES) -> CheckpointStore:
    """A store that needs no disk."""
    return CheckpointStore(MemoryPlace(), shard_bytes)


def state_after(epoch: int, rows: int = 40) -> State:
    """A state with tensors of several kinds; each epoch's is another."""
    return {
        "epoch": epoch,
        "step": 0,
        "network": {
            "layer.weight": torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) + epoch,
            "layer.bias": torch.full((3,), float(epoch), dtype=torch.bfloat16),
            "seen": torch.tensor(epoch),
        },
        "optimizer": {"layer.weight/exp_avg": torch.ones(rows, 3) * epoch, "step": 7.0},
        "strategy": {"scale": 65536.0, "mask": torch.tensor([True, False]), "none": None},
        "history": [{"epoch": e, "loss": 0.5} for e in range(epoch)],
        "best_weights": {},
    }


def assert_equal(seen: Any, expected: Any) -> None:
    """Two states are equal, tensors to the last bit, and have the same containers."""
    if isinstance(expected, Tensor):
        assert seen.dtype == expected.dtype
        assert seen.shape == expected.shape
        assert torch.equal(_bits(seen), _bits(expected))
    elif isinstance(expected, dict):
        assert list(seen) == list(expected)
        for key, value in expected.items():
            assert_equal(seen[key], value)
    elif isinstance(expected, list | tuple):
        assert type(seen) is type(expected)
        assert len(seen) == len(expected)
        for item, value in zip(seen, expected, strict=True):
            assert_equal(item, value)
    else:
        assert type(seen) is type(expected)
        assert seen == expected or (seen != seen and expected != expected)


def _bits(tensor: Tensor) -> Tensor:
    return (
        tensor.detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
    )


def folder_of(store_folder: Path, ref: CheckpointRef) -> Path:
    """Where the files of a checkpoint are."""
    return store_folder / ref.name


def parts_of(store_folder: Path, ref: CheckpointRef) -> list[Path]:
    """The parts of a checkpoint."""
    return sorted(folder_of(store_folder, ref).glob("part-*.safetensors"))


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def save_epochs(store: CheckpointStore, *epochs: int) -> list[CheckpointRef]:
    """Save the state after each of some epochs."""
    return [store.save(epoch, 0, state_after(epoch)) for epoch in epochs]
