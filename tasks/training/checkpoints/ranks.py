"""Checkpoints that all ranks write together, each its own part, and how ranks agree on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from tasks.kernel.errors import FalajError, StorageError
from tasks.training.checkpoints.manifest import CheckpointRef, Section
from tasks.training.checkpoints.state import TakenApart, TensorRows, name_of, take_apart
from tasks.training.checkpoints.store import NUM_KEPT, CheckpointStore
from tasks.training.strategies.base import Communicator


def agreed_newest(store: CheckpointStore, exchange: Communicator) -> CheckpointRef | None:
    """The newest whole checkpoint, which rank 0 looks for; the same on all ranks. Collective.

    Raises:
        TransientError, StorageError: on rank 0, as `CheckpointStore.newest`.
    """
    found = store.newest() if exchange.rank == 0 else None
    name = exchange.gather_values(found.name if found else "")[0]
    return CheckpointRef.parse(str(name))


def save_by_ranks(
    store: CheckpointStore,
    exchange: Communicator,
    epoch: int,
    step: int,
    state: Mapping[str, Any],
    num_kept: int = NUM_KEPT,
) -> CheckpointRef:
    """Write a state of which each rank holds some, and prune. Collective; returns when it is done.

    Args:
        store: a place that all ranks reach.
        exchange: the other ranks.
        epoch: where training goes on from.
        step: likewise.
        state: rank 0's plain values count. A tensor that is cut over ranks is given as `TensorRows`
            on each; one that several ranks have whole is written by one of them.
        num_kept: whole checkpoints to keep.

    Raises:
        StorageError: a rank's write failed; raised on all ranks, the sentence names the one.
            Earlier checkpoints are untouched.
    """
    ref = CheckpointRef.parse(str(exchange.gather_values(CheckpointRef.new(epoch, step).name)[0]))
    assert ref  # what rank 0 has just named
    state_here = take_apart(state)
    own = _own_share(state_here, exchange)

    def finish(sections: list[Any]) -> None:
        if exchange.rank == 0:
            written = [Section.model_validate(section) for section in sections]
            store.finish(ref, written, own.plain)
            store.prune(num_kept)

    with store.being_written(ref) if exchange.rank == 0 else nullcontext():
        sections = _on_all_ranks(
            exchange, lambda: store.write_section(ref, own, exchange.rank).model_dump(mode="json")
        )
        _on_all_ranks(exchange, lambda: finish(sections))
    return ref


def _on_all_ranks(exchange: Communicator, action: Callable[[], object]) -> list[Any]:
    """What each rank's `action` returned, in rank order; an error of one is raised on all."""
    try:
        report = {"result": action()}
    except FalajError as exc:
        report = {"error": f"{type(exc).__name__}: {exc}"}
    reports: list[Any] = exchange.gather_values(report)
    for rank, of_rank in enumerate(reports):
        if "error" in of_rank:
            raise StorageError(f"the checkpoint of rank {rank} failed: {of_rank['error']}")
    return [of_rank["result"] for of_rank in reports]


def _own_share(state: TakenApart, exchange: Communicator) -> TakenApart:
    """What this rank writes: its rows, and an equal share of what others have whole as well."""
    sizes = {
        name_of(keys): leaf.nbytes
        for keys, leaf in state.tensors.items()
        if not isinstance(leaf, TensorRows)
    }
    writer = _dealt([dict(of_rank) for of_rank in exchange.gather_values(sizes)])  # type: ignore[call-overload]
    own = {
        keys: leaf
        for keys, leaf in state.tensors.items()
        if writer.get(name_of(keys), exchange.rank) == exchange.rank
    }
    return TakenApart(state.plain, own)


def _dealt(sizes_by_rank: list[dict[str, int]]) -> dict[str, int]:
    """Which rank writes each tensor: of those that have it, the one with the least so far."""
    num_bytes = [0] * len(sizes_by_rank)
    writer: dict[str, int] = {}
    sizes = {name: size for of_rank in sizes_by_rank for name, size in of_rank.items()}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owners = [rank for rank, of_rank in enumerate(sizes_by_rank) if name in of_rank]
        writer[name] = min(owners, key=lambda rank: num_bytes[rank])
        num_bytes[writer[name]] += size
    return writer
