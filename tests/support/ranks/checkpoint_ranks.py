"""One rank that writes or reads checkpoints with the others: `python -m ... FOLDER save|load`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.kernel.errors import StorageError
from tasks.kernel.files import write_atomically
from tasks.training.checkpoints.location import Location
from tasks.training.checkpoints.state import TensorRows
from tasks.training.checkpoints.store import CheckpointStore, agreed_newest, save_by_ranks
from tasks.training.strategies.base import Communicator
from tasks.training.strategies.horovod_communicator import HorovodCommunicator

NUM_ROWS = 1000
NUM_KEPT = 2


def cut_tensor() -> Tensor:
    """The tensor of which each rank has some rows."""
    return torch.arange(NUM_ROWS * 8, dtype=torch.float32).view(NUM_ROWS, 8)


def whole_tensors() -> dict[str, Tensor]:
    """Tensors that every rank has whole."""
    return {f"bias{number}": torch.full((2000,), float(number)) for number in range(4)}


def rows_of(rank: int, size: int) -> slice:
    """Rows of the cut tensor that a rank has; the last rank has more than the others."""
    each = NUM_ROWS // (size + 1)
    return slice(rank * each, NUM_ROWS if rank == size - 1 else (rank + 1) * each)


class FullLocation(Location):
    """A folder on a full disk."""

    def write(self, name: str, content: bytes) -> None:
        raise StorageError(f"{name}: No space left on device")


def save(folder: Path, ranks: Communicator) -> dict[str, Any]:
    mine = rows_of(ranks.rank, ranks.size)
    state = {
        "epoch": 1,
        "network": {"cut": TensorRows(cut_tensor()[mine], mine.start, NUM_ROWS), **whole_tensors()},
        "world_size": ranks.size,
    }
    store = CheckpointStore(Location(folder))
    refs = [save_by_ranks(store, ranks, e, 0, state, NUM_KEPT).name for e in (1, 2, 3)]
    full = CheckpointStore(FullLocation(folder)) if ranks.rank == 1 else store
    refused = ""
    try:
        save_by_ranks(full, ranks, 4, 0, state, NUM_KEPT)
    except StorageError as exc:
        refused = str(exc)
    return {"refs": refs, "refused": refused}


def load(folder: Path, ranks: Communicator) -> dict[str, Any]:
    store = CheckpointStore(Location(folder))
    ref = agreed_newest(store, ranks)
    assert ref
    state = store.load(ref)
    assert torch.equal(state["network"]["cut"], cut_tensor())
    return {"ref": ref.name, "saved_by": state["world_size"]}


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    ranks = HorovodCommunicator()
    seen = {"save": save, "load": load}[what](folder / "checkpoints", ranks)
    write_atomically(folder / f"{what}-{ranks.rank}.json", json.dumps(seen))
    ranks.shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
