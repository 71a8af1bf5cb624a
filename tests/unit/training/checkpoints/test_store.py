import errno
import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tasks.kernel.errors import ArtifactError, StorageError, TrainingError
from tasks.training.checkpoints.store import (
    MANIFEST_NAME,
    STATE_NAME,
    CheckpointRef,
    checked,
    deserialized,
    to_host,
)
from tests.support.training import states

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.uint8, torch.float8_e4m3fn, torch.bool, torch.complex64,
)  # fmt: skip
NAMES = st.text(st.characters(codec="utf-8"), max_size=12)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(), st.text(max_size=20)
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any kind and shape, any bits (NaNs too), contiguous or not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    content = np.random.default_rng(seed).bytes(prod(shape) * dtype.itemsize)
    bits = torch.from_numpy(np.frombuffer(content or b"", dtype=np.uint8).copy())
    if dtype == torch.bool:
        bits &= 1
    tensor = bits.view(dtype).reshape(shape) if bits.numel() else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


def containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(NAMES | st.integers(0, 99), items, max_size=4),
        st.lists(items, max_size=3),
        st.lists(items, max_size=3).map(tuple),
    )


STATES = st.dictionaries(NAMES, st.recursive(PLAIN | tensors(), containers, max_leaves=12))


@given(STATES)
def test_any_state_comes_back_to_the_last_bit(state: dict[str, Any]) -> None:
    states.assert_equal(deserialized(checked(to_host(state, copy=True))), state)


def test_a_state_comes_back_and_the_newest_is_the_one_that_training_is_furthest_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = states.store_in(tmp_path / "new")
    assert store.newest() is None
    store.save(2, 0, states.state_after(2))
    furthest = store.save(2, 70, states.state_after(3))
    store.save(1, 900, states.state_after(1))
    assert states.store_in(tmp_path / "new").newest() == furthest
    states.assert_equal(store.load(furthest), states.state_after(3))
    assert caplog.text == ""


def test_a_tensor_that_is_in_a_state_twice_or_is_a_view_takes_its_own_space_once(
    tmp_path: Path,
) -> None:
    store, large = states.store_in(tmp_path), torch.ones(1 << 20)
    few = large[:1000]
    ref = store.save(1, 0, {"best": few, "network": few})
    assert (tmp_path / ref.name / STATE_NAME).stat().st_size < 2 * few.nbytes


class Harmful:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("echo",)


@pytest.mark.parametrize("value", [Harmful(), torch.optim.SGD, lambda: 0])
def test_what_would_run_code_or_cannot_be_loaded_is_refused_when_it_is_saved(
    value: object, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match="holds what a checkpoint must not hold"):
        states.store_in(tmp_path).save(1, 0, {"epoch": value})
    assert list(tmp_path.iterdir()) == []
    torch.save(Harmful(), tmp_path / "forged")
    with pytest.raises(ArtifactError):
        deserialized((tmp_path / "forged").read_bytes())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("name", [MANIFEST_NAME, STATE_NAME])
@pytest.mark.parametrize("damage", [truncate, states.flip_a_bit, Path.unlink])
def test_a_damaged_checkpoint_is_passed_over(
    damage: Callable[[Path], None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, damaged = states.save_epochs(states.store_in(tmp_path), 1, 2)
    damage(tmp_path / damaged.name / name)
    store = states.store_in(tmp_path)
    assert store.newest() == whole
    assert damaged.name in caplog.text
    with pytest.raises(ArtifactError):
        store.load(damaged)


def test_foreign_files_and_other_formats_are_passed_over_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = states.store_in(tmp_path)
    (whole,) = states.save_epochs(store, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / MANIFEST_NAME).write_text("{}")
    newer = tmp_path / CheckpointRef.new(9, 0).name
    newer.mkdir()
    (newer / MANIFEST_NAME).write_text(json.dumps({"format": 1, "sha256": "", "content": {}}))
    assert states.store_in(tmp_path).newest() == whole
    assert "notes.txt" in caplog.text
    assert "its format is 1, expected 3" in caplog.text
    store.prune(1)
    assert {path.name for path in tmp_path.iterdir()} == {whole.name, "notes.txt", "folder"}
    store.clear()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "folder"}


def test_pruning_keeps_the_newest_few_and_never_removes_the_last_complete_one(
    tmp_path: Path,
) -> None:
    refs = states.save_epochs(states.store_in(tmp_path), 1, 2, 3, 4)
    states.store_in(tmp_path).prune(3)
    assert {path.name for path in tmp_path.iterdir()} == {ref.name for ref in refs[1:]}
    for ref in refs[2:]:
        states.flip_a_bit(tmp_path / ref.name / STATE_NAME)
    states.store_in(tmp_path).prune(1)
    assert [path.name for path in tmp_path.iterdir()] == [refs[1].name]


@pytest.mark.parametrize("leftover", ["", ".state.pt-77-aside", STATE_NAME])
def test_what_a_killed_writer_left_goes_and_damaged_ones_stay_where_none_is_complete(
    leftover: str, tmp_path: Path
) -> None:
    (damaged,) = states.save_epochs(states.store_in(tmp_path), 1)
    states.flip_a_bit(tmp_path / damaged.name / STATE_NAME)
    left = tmp_path / CheckpointRef.new(2, 0).name
    left.mkdir()
    if leftover:
        (left / leftover).write_bytes(b"half")
    store = states.store_in(tmp_path)
    assert store.newest() is None
    store.prune(1)
    assert [path.name for path in tmp_path.iterdir()] == [damaged.name]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_refusing_disk_is_a_clear_error_and_leaves_the_one_before(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = states.store_in(tmp_path)
    (whole,) = states.save_epochs(store, 1)

    def refuse(path: Path, content: bytes) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refuse)
        with pytest.raises(StorageError, match=os.strerror(code)):
            store.save(2, 0, states.state_after(2))
    assert store.newest() == whole
    assert not list(tmp_path.rglob("*aside*"))
