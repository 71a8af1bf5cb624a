from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.kernel.errors import ArtifactError, StorageError, TrainingError
from tasks.training.checkpoints import places
from tasks.training.checkpoints.config import CheckpointConfig
from tasks.training.checkpoints.manifest import CheckpointRef, Section
from tasks.training.checkpoints.state import TensorRows, take_apart
from tasks.training.checkpoints.store import CheckpointStore, open_store
from tests.support.training.states import (
    assert_equal,
    flip_a_bit,
    parts_of,
    save_epochs,
    state_after,
    store_in,
)


def test_a_state_comes_back_as_it_was_and_is_cut_into_parts(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    (ref,) = save_epochs(store, 3)
    assert store_in(tmp_path).newest() == ref
    assert_equal(store_in(tmp_path).load(ref), state_after(3))
    parts = parts_of(tmp_path, ref)
    assert len(parts) > 4
    assert all(part.stat().st_size < 1024 for part in parts)


def test_a_part_is_a_file_that_public_tools_read(tmp_path: Path) -> None:
    store = store_in(tmp_path, shard_bytes=1 << 20)
    (ref,) = save_epochs(store, 3)
    (part,) = parts_of(tmp_path, ref)
    tensors = load_file(part)
    assert torch.equal(tensors["network/layer.weight"], state_after(3)["network"]["layer.weight"])


def test_an_empty_place_has_no_checkpoint(tmp_path: Path) -> None:
    assert store_in(tmp_path / "none").newest() is None


def test_the_newest_is_the_one_that_training_is_furthest_in(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(2, 0, state_after(2))
    furthest = store.save(2, 70, state_after(2))
    store.save(1, 900, state_after(1))
    assert store.newest() == furthest


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    (ref,) = save_epochs(store, 3)
    whole = state_after(3)
    seen = store.load(ref, ["network", "optimizer/layer.weight/exp_avg"])
    assert_equal(seen["network"], whole["network"])
    assert_equal(seen["optimizer"], whole["optimizer"])
    assert seen["strategy"] == {"scale": 65536.0, "none": None}
    assert seen["history"] == whole["history"]


def test_a_part_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    (ref,) = save_epochs(store, 3)
    os.truncate(parts_of(tmp_path, ref)[-1], 3)
    assert_equal(store.load(ref, ["network"])["network"], state_after(3)["network"])
    with pytest.raises(ArtifactError, match="incomplete or damaged"):
        store.load(ref)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, ("echo",)

    with pytest.raises(TrainingError, match="holds what a checkpoint must not hold"):
        store_in(tmp_path).save(1, 0, {"epoch": Harmful()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"x": torch.ones(2).to_sparse()}, "x is a Tensor of torch.float32 with layout"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"x": torch.ones(2, device="meta")}, "expected a plain dense tensor"),
        ({("a", 1): torch.ones(2)}, "keys that are text or whole numbers"),
        (reduce(lambda inner, _: {"a": inner}, range(70), torch.ones(2)), "at most 64 keys"),
        ({0: torch.ones(2), "0": torch.ones(2)}, "the same name"),
        ({"x": torch.optim.SGD}, "must not hold"),
        ({"x": lambda: 0}, "must not hold"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(
    state: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=reason):
        store_in(tmp_path).save(1, 0, state)
    assert list(tmp_path.iterdir()) == []


def test_pruning_keeps_the_newest_few(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    refs = save_epochs(store, 1, 2, 3, 4)
    store.prune(2)
    assert {path.name for path in tmp_path.iterdir()} == {ref.name for ref in refs[2:]}


def test_pruning_never_removes_the_last_whole_one(tmp_path: Path) -> None:
    refs = save_epochs(store_in(tmp_path), 1, 2, 3)
    for ref in refs[1:]:
        flip_a_bit(parts_of(tmp_path, ref)[0])
    store = store_in(tmp_path)
    store.prune(1)
    assert [path.name for path in tmp_path.iterdir()] == [refs[0].name]
    assert store.newest() == refs[0]


def test_where_none_is_whole_nothing_is_removed_but_leftovers(tmp_path: Path) -> None:
    (damaged,) = save_epochs(store_in(tmp_path), 1)
    flip_a_bit(parts_of(tmp_path, damaged)[0])
    left = tmp_path / CheckpointRef.new(2, 0).name
    left.mkdir()
    (left / "part-00000-00000.safetensors").write_bytes(b"half")
    store_in(tmp_path).prune(1)
    assert [path.name for path in tmp_path.iterdir()] == [damaged.name]


def test_a_checkpoint_that_is_being_read_is_not_removed(tmp_path: Path) -> None:
    refs = save_epochs(store_in(tmp_path), 1, 2)
    store = store_in(tmp_path)
    with places.LocalPlace(tmp_path).in_use(refs[0].name):
        store.prune(1)
        assert_equal(store.load(refs[0]), state_after(1))
    store.prune(1)
    assert [path.name for path in tmp_path.iterdir()] == [refs[1].name]


def test_a_full_disk_is_a_sentence_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    (whole,) = save_epochs(store, 1)
    written = 0

    def full_disk(descriptor: int, chunk: memoryview) -> int:
        nonlocal written
        written += len(chunk)
        if written > 700:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(descriptor, chunk, os.lseek(descriptor, 0, os.SEEK_CUR))

    with monkeypatch.context() as patch:
        patch.setattr(places, "_write_all", full_disk)
        with pytest.raises(StorageError, match="No space left on device"):
            store.save(2, 0, state_after(2))
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]
    assert store.newest() == whole


def test_a_worn_out_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worn_out(descriptor: int, chunk: memoryview) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(places, "_write_all", worn_out)
    with pytest.raises(StorageError, match="Input/output error"):
        store_in(tmp_path).save(2, 0, state_after(2))


def test_a_place_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="the disk refused a write"):
        store_in(tmp_path / "taken").save(1, 0, state_after(1))


def test_loading_allocates_the_state_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path, 1 << 12)
    ref = store.save(1, 0, {"w": torch.zeros(1 << 12), "v": torch.ones(100, 100)})
    allocated: list[int] = []
    make = torch.empty

    def counted(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = make(tuple(shape), dtype=dtype)
        allocated.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    state = store.load(ref)
    assert sum(allocated) < sum(tensor.nbytes for tensor in state.values()) + 4096


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    inside = open_store(CheckpointConfig(), tmp_path / "run-a")
    outside = CheckpointConfig(uri=f"file://{tmp_path / 'far'}")
    assert str(inside) == str(tmp_path / "run-a" / "checkpoints")
    assert str(open_store(outside, tmp_path / "run-a")) == str(tmp_path / "far" / "run-a")
    save_epochs(open_store(outside, tmp_path / "run-a"), 1)
    assert open_store(outside, tmp_path / "run-b").newest() is None


def test_a_finished_run_leaves_no_checkpoint(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save_epochs(store, 1, 2)
    (tmp_path / "notes.txt").write_text("mine")
    store.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert store.newest() is None


def test_what_was_saved_does_not_follow_later_changes_of_plain_values(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    state = state_after(2)
    ref = store.save(2, 0, state)
    state["history"].append("later")
    assert len(store.load(ref)["history"]) == 2


def test_loading_says_nothing_where_all_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    save_epochs(store, 1)
    with caplog.at_level(logging.INFO):
        store.newest()
    assert caplog.text == ""


def section_of(store: CheckpointStore, ref: CheckpointRef, rank: int, **state: object) -> Section:
    return store.write_section(ref, take_apart(state), rank)


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "reason"),
    [
        (torch.ones(4), torch.ones(4), "pieces that do not make a whole"),
        (
            TensorRows(torch.ones(2, 3), 0, 6),
            TensorRows(torch.ones(2, 3), 4, 6),
            "pieces that do not make a whole",
        ),
    ],
)
def test_parts_of_ranks_that_make_no_whole_are_refused(
    of_rank_0: object, of_rank_1: object, reason: str, tmp_path: Path
) -> None:
    store, ref = store_in(tmp_path), CheckpointRef.new(1, 0)
    sections = [
        section_of(store, ref, rank, w=of_rank)
        for rank, of_rank in enumerate((of_rank_0, of_rank_1))
    ]
    with pytest.raises(TrainingError, match=reason):
        store.finish(ref, sections, take_apart({"w": of_rank_0}).plain)
    assert store.newest() is None


def test_a_list_is_not_made_longer_by_another_rank(tmp_path: Path) -> None:
    store, ref = store_in(tmp_path), CheckpointRef.new(1, 0)
    sections = [
        section_of(store, ref, 0, w=[torch.ones(1), 0]),
        section_of(store, ref, 1, w=[0, 0, torch.ones(1)]),
    ]
    with pytest.raises(TrainingError, match="a tensor has no place in the state"):
        store.finish(ref, sections, take_apart({"w": [torch.ones(1), 0]}).plain)


@pytest.mark.parametrize("leftovers", [[], [".part-00000-00000.safetensors.aside"]])
def test_what_a_writer_left_that_was_killed_in_its_first_part_is_pruned(
    leftovers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    (whole,) = save_epochs(store, 1)
    left = tmp_path / CheckpointRef.new(2, 0).name
    left.mkdir()
    for name in leftovers:
        (left / name).write_bytes(b"half")
    assert store.newest() == whole
    assert f"{left.name} in {tmp_path} has no manifest" in caplog.text
    store.prune(1)
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]


def test_one_element_of_a_wider_tensor_comes_back(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    state = {"column": torch.arange(6.0).view(2, 3)[1:, 1:2].t(), "one": torch.arange(9)[4::9]}
    assert_equal(store.load(store.save(1, 0, state)), state)
