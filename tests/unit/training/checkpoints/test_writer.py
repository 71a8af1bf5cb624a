from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.kernel.errors import StorageError, TrainingError
from tasks.training.checkpoints.manifest import MANIFEST_NAME
from tasks.training.checkpoints.places import LocalPlace
from tasks.training.checkpoints.store import CheckpointStore
from tasks.training.checkpoints.writer import CheckpointWriter
from tests.support.host.processes import wait_until
from tests.support.training.states import (
    SHARD_BYTES,
    assert_equal,
    state_after,
    store_in,
)

CONFIG: dict[str, Any] = {"every_s": 60, "asynchronous": True, "num_kept": 10}


class HeldPlace(LocalPlace):
    """A folder whose writes wait until they are let go, or fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.is_full = False
        self.hold_after_parts = 0

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        if self.hold_after_parts:
            self.hold_after_parts -= 1
            super().write(name, chunks)
            return
        self.begun.set()
        assert self.may_go_on.wait(60)
        if self.is_full:
            raise StorageError(f"{name}: {os.strerror(errno.ENOSPC)}")
        super().write(name, chunks)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[HeldPlace]:
    held = HeldPlace(tmp_path)
    yield held
    held.may_go_on.set()


@contextmanager
def writer_that_writes(place: HeldPlace, epoch: int, step: int) -> Iterator[CheckpointWriter]:
    """A writer that has begun with one checkpoint and cannot go on with it."""
    writer = CheckpointWriter(CheckpointStore(place, SHARD_BYTES), **CONFIG)
    writer.save(epoch, step, state_after(epoch))
    assert place.begun.wait(60)
    yield writer
    place.may_go_on.set()
    writer.close()


def saved(folder: Path) -> list[tuple[int, int]]:
    names = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}"))
    return [(int(name.split("-")[1]), int(name.split("-")[2])) for name in names]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_checkpoints_are_written_and_pruned(asynchronous: bool, tmp_path: Path) -> None:
    with CheckpointWriter(store_in(tmp_path), 60, asynchronous=asynchronous) as writer:
        for epoch in range(1, 5):
            writer.save(epoch, 0, state_after(epoch))
    assert saved(tmp_path) == [(3, 0), (4, 0)]
    ref = store_in(tmp_path).newest()
    assert ref
    assert_equal(store_in(tmp_path).load(ref), state_after(4))
    assert writer.figures.num_written == 4
    assert writer.figures.num_left_out == 0
    assert (writer.figures.copy_s > 0) == asynchronous


def test_training_may_change_the_state_while_it_is_written(
    place: HeldPlace, tmp_path: Path
) -> None:
    weights = torch.zeros(50)
    state = {"network": {"w": weights}, "history": [1]}
    writer = CheckpointWriter(CheckpointStore(place, SHARD_BYTES), **CONFIG)
    writer.save(1, 0, state)
    weights += 1
    state["history"].append(2)  # type: ignore[attr-defined]
    place.may_go_on.set()
    writer.close()
    ref = store_in(tmp_path).newest()
    assert ref
    assert_equal(store_in(tmp_path).load(ref), {"network": {"w": torch.zeros(50)}, "history": [1]})


def test_a_newer_one_takes_the_place_of_one_that_waits(place: HeldPlace, tmp_path: Path) -> None:
    with writer_that_writes(place, 1, 10) as writer:
        for step in (20, 30, 40):
            writer.save(1, step, state_after(step))
    assert saved(tmp_path) == [(1, 10), (1, 40)]
    assert writer.figures.num_left_out == 2
    ref = store_in(tmp_path).newest()
    assert ref
    assert_equal(store_in(tmp_path).load(ref), state_after(40))


def test_one_that_ends_an_epoch_is_never_dropped(place: HeldPlace, tmp_path: Path) -> None:
    with writer_that_writes(place, 1, 10) as writer:
        writer.save(1, 20, state_after(1))
        writer.save(2, 0, state_after(2))
        writer.save(2, 10, state_after(2))
    assert saved(tmp_path) == [(1, 10), (2, 0)]
    assert writer.figures.num_left_out == 2


def test_two_that_end_epochs_wait_for_the_disk(place: HeldPlace, tmp_path: Path) -> None:
    with writer_that_writes(place, 1, 0) as writer:
        writer.save(2, 0, state_after(2))
        third = threading.Thread(target=writer.save, args=(3, 0, state_after(3)))
        third.start()
        assert saved(tmp_path) == []
        place.may_go_on.set()
        third.join(60)
        assert not third.is_alive()
    assert saved(tmp_path) == [(1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_refused_write_is_an_error_of_the_training_thread(
    at_the_end: bool, place: HeldPlace, tmp_path: Path
) -> None:
    writer = CheckpointWriter(CheckpointStore(place, SHARD_BYTES), **CONFIG)
    place.is_full = True
    place.may_go_on.set()
    writer.save(1, 0, state_after(1))
    if not at_the_end:
        wait_until(lambda: writer.failed, "the write has failed")
    with pytest.raises(StorageError, match="No space left on device"):
        writer.close() if at_the_end else writer.save(2, 0, state_after(2))
    writer.close()
    assert saved(tmp_path) == []


def train_until_the_loss_is_no_number(writer: CheckpointWriter) -> None:
    with writer:
        writer.save(1, 0, state_after(1))
        raise TrainingError("the loss is no number")


def test_the_error_that_ended_training_is_not_hidden_by_one_of_the_writer(
    place: HeldPlace, caplog: pytest.LogCaptureFixture
) -> None:
    place.is_full = True
    place.may_go_on.set()
    writer = CheckpointWriter(CheckpointStore(place, SHARD_BYTES), **CONFIG)
    with pytest.raises(TrainingError, match="the loss is no number"):
        train_until_the_loss_is_no_number(writer)
    assert "a checkpoint was not written either" in caplog.text


def test_after_an_error_in_training_what_was_saved_is_still_written(tmp_path: Path) -> None:
    writer = CheckpointWriter(store_in(tmp_path), **CONFIG)
    with pytest.raises(TrainingError):
        train_until_the_loss_is_no_number(writer)
    assert saved(tmp_path) == [(1, 0)]


def test_tensors_may_change_their_shape_from_one_checkpoint_to_the_next(tmp_path: Path) -> None:
    with CheckpointWriter(store_in(tmp_path), **CONFIG) as writer:
        for epoch, rows in ((1, 40), (2, 10), (3, 60), (4, 60)):
            writer.save(epoch, 0, state_after(epoch, rows))
    store = store_in(tmp_path)
    ref = store.newest()
    assert ref
    assert_equal(store.load(ref), state_after(4, 60))


def test_it_is_time_for_one_when_the_last_is_long_enough_ago(tmp_path: Path) -> None:
    with CheckpointWriter(store_in(tmp_path), 0.2, asynchronous=True) as writer:
        wait_until(lambda: writer.is_due, "0.2 s have passed")
        writer.save(1, 0, state_after(1))
    with CheckpointWriter(store_in(tmp_path), 86400, asynchronous=True) as writer:
        assert not writer.is_due


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    with (
        CheckpointWriter(store_in(tmp_path), **CONFIG) as writer,
        pytest.raises(TrainingError, match="expected a plain dense tensor"),
    ):
        writer.save(1, 0, {"x": torch.ones(2).to_sparse()})


def test_a_leftover_takes_no_space_from_the_first_checkpoint(tmp_path: Path) -> None:
    left = tmp_path / "state-00001-000000000-00000000"
    left.mkdir()
    (left / "part-00000-00000.safetensors").write_bytes(b"half")
    with CheckpointWriter(store_in(tmp_path), **CONFIG) as writer:
        writer.save(1, 0, state_after(1))
    assert not left.exists()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_follows_a_checkpoint_follows_when_it_is_whole(
    asynchronous: bool, tmp_path: Path
) -> None:
    seen: list[list[tuple[int, int]]] = []
    with CheckpointWriter(store_in(tmp_path), 60, asynchronous=asynchronous) as writer:
        writer.save(1, 0, state_after(1), lambda: seen.append(saved(tmp_path)))
    assert seen == [[(1, 0)]]


def test_nothing_follows_a_checkpoint_that_was_refused(place: HeldPlace) -> None:
    seen: list[int] = []
    place.is_full = True
    place.may_go_on.set()
    writer = CheckpointWriter(CheckpointStore(place, SHARD_BYTES), **CONFIG)
    writer.save(1, 0, state_after(1), lambda: seen.append(1))
    with pytest.raises(StorageError):
        writer.close()
    assert seen == []


def test_pruning_leaves_what_another_thread_is_writing(place: HeldPlace, tmp_path: Path) -> None:
    place.may_go_on.set()
    store = CheckpointStore(place, SHARD_BYTES)
    store.save(1, 0, state_after(1))
    place.hold_after_parts = 1
    place.may_go_on.clear()
    other = threading.Thread(target=store.save, args=(2, 0, state_after(2)))
    other.start()
    wait_until(lambda: list(tmp_path.glob("state-00002-*/part-*")), "a part is written")
    store.prune(1)
    place.may_go_on.set()
    other.join(60)
    assert saved(tmp_path) == [(1, 0), (2, 0)]
    ref = store_in(tmp_path).newest()
    assert ref
    assert_equal(store_in(tmp_path).load(ref), state_after(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_on_a_gpu_is_written_from_host_memory(asynchronous: bool, tmp_path: Path) -> None:
    weights = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    with CheckpointWriter(store_in(tmp_path, 1 << 20), 60, asynchronous=asynchronous) as writer:
        writer.save(1, 0, {"w": weights})
        weights += 1
    ref = store_in(tmp_path).newest()
    assert ref
    assert_equal(store_in(tmp_path).load(ref), {"w": torch.arange(1 << 20, dtype=torch.float32)})
