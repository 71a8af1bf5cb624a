import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tasks.kernel.errors import StorageError, TrainingError
from tasks.training.checkpoints.disk import Disk
from tasks.training.checkpoints.store import MANIFEST_NAME, CheckpointStore
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.strategies.base import State
from tests.support.training.checkpoint_writer import kill_and_look
from tests.support.training.states import assert_equal, state_after, store_in


class HeldDisk(Disk):
    """A folder whose writes wait until they are let go, or fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.is_full = False

    def write(self, name: str, content: bytes) -> None:
        self.begun.set()
        assert self.may_go_on.wait(60)
        if self.is_full:
            raise StorageError(f"{name}: No space left on device")
        super().write(name, content)


@pytest.fixture
def location(tmp_path: Path) -> Iterator[HeldDisk]:
    held = HeldDisk(tmp_path)
    yield held
    held.may_go_on.set()


def writer_of(store: CheckpointStore) -> CheckpointWriter:
    return CheckpointWriter(store, 60, asynchronous=True, num_kept=10)


def saved(folder: Path) -> list[tuple[int, int]]:
    names = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}"))
    return [(int(name.split("-")[1]), int(name.split("-")[2])) for name in names]


def newest_state(folder: Path) -> State:
    return store_in(folder).load(store_in(folder).newest())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_checkpoints_are_written_and_pruned_and_what_follows_one_follows_when_it_is_complete(
    asynchronous: bool, tmp_path: Path
) -> None:
    left = tmp_path / "state-00001-000000000-00000000"
    left.mkdir()
    seen: list[tuple[int, int]] = []
    with CheckpointWriter(store_in(tmp_path), 60, asynchronous=asynchronous) as writer:
        for epoch, rows in ((1, 40), (2, 10), (3, 60), (4, 60)):
            writer.save(
                epoch, 0, state_after(epoch, rows), lambda: seen.append(saved(tmp_path)[-1])
            )
    assert saved(tmp_path) == [(3, 0), (4, 0)]
    assert seen == [(epoch, 0) for epoch in (1, 2, 3, 4)]
    assert_equal(newest_state(tmp_path), state_after(4, 60))
    assert not left.exists()


def test_training_may_change_the_state_while_it_is_written(
    location: HeldDisk, tmp_path: Path
) -> None:
    weights = torch.zeros(50)
    state = {"network": {"w": weights}, "history": [1]}
    writer = writer_of(CheckpointStore(location))
    writer.save(1, 0, state)
    weights += 1
    state["history"].append(2)  # type: ignore[attr-defined]
    location.may_go_on.set()
    writer.close()
    assert_equal(newest_state(tmp_path), {"network": {"w": torch.zeros(50)}, "history": [1]})


def test_within_an_epoch_one_is_left_out_while_another_is_written_and_at_its_end_never(
    location: HeldDisk, tmp_path: Path
) -> None:
    writer = writer_of(CheckpointStore(location))
    writer.save(1, 10, state_after(1))
    assert location.begun.wait(60)
    writer.save(1, 20, state_after(1))
    ending = threading.Thread(target=writer.save, args=(2, 0, state_after(2)))
    ending.start()
    assert saved(tmp_path) == []
    location.may_go_on.set()
    ending.join(60)
    writer.close()
    assert saved(tmp_path) == [(1, 10), (2, 0)]


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_refused_write_is_an_error_of_the_training_thread(
    at_the_end: bool, location: HeldDisk, tmp_path: Path
) -> None:
    followed: list[int] = []
    writer = writer_of(CheckpointStore(location))
    location.is_full = True
    location.may_go_on.set()
    writer.save(1, 0, state_after(1), lambda: followed.append(1))
    with pytest.raises(StorageError, match="No space left on device"):
        writer.close() if at_the_end else writer.save(2, 0, state_after(2))
    writer.close()
    assert (saved(tmp_path), followed) == ([], [])


@pytest.mark.parametrize("is_full", [True, False])
def test_the_error_that_ended_training_is_not_hidden_and_what_was_saved_is_written(
    is_full: bool, location: HeldDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    location.is_full = is_full
    location.may_go_on.set()

    def train() -> None:
        with writer_of(CheckpointStore(location)) as writer:
            writer.save(1, 0, state_after(1))
            raise TrainingError("the loss is no number")

    with pytest.raises(TrainingError, match="the loss is no number"):
        train()
    assert ("a checkpoint was not written either" in caplog.text) is is_full
    assert saved(tmp_path) == ([] if is_full else [(1, 0)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_on_a_gpu_is_written_from_host_memory(asynchronous: bool, tmp_path: Path) -> None:
    weights = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    with CheckpointWriter(store_in(tmp_path), 60, asynchronous=asynchronous) as writer:
        writer.save(1, 0, {"w": weights})
        weights += 1
    assert_equal(newest_state(tmp_path), {"w": torch.arange(1 << 20, dtype=torch.float32)})


def test_kill_9_at_any_moment_leaves_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    kill_and_look([str(tmp_path)], num_kills=5, seed=1)
