"""Damaged, incomplete, forged and foreign checkpoints are passed over, in a sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.kernel.errors import ArtifactError
from tasks.training.checkpoints.manifest import MANIFEST_NAME, CheckpointRef
from tests.support.training.states import (
    flip_a_bit,
    folder_of,
    parts_of,
    save_epochs,
    store_in,
)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [truncate, lengthen, flip_a_bit, empty, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("position", [0, 1, -1])
def test_a_damaged_part_is_passed_over_in_a_sentence(
    damage: Callable[[Path], None],
    position: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole, damaged = save_epochs(store_in(tmp_path), 1, 2)
    damage(parts_of(tmp_path, damaged)[position])
    store = store_in(tmp_path)
    assert store.newest() == whole
    assert f"checkpoint {damaged} in {tmp_path} is incomplete or damaged: " in caplog.text
    with pytest.raises(ArtifactError, match="It does not count; training goes on from the one"):
        store.load(damaged)


@pytest.mark.parametrize("damage", [*DAMAGES, lambda path: path.write_bytes(b"[" * 100_000)])
def test_a_damaged_manifest_is_passed_over(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, damaged = save_epochs(store_in(tmp_path), 1, 2)
    damage(folder_of(tmp_path, damaged) / MANIFEST_NAME)
    assert store_in(tmp_path).newest() == whole
    assert damaged.name in caplog.text


def test_any_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    whole, damaged = save_epochs(store_in(tmp_path, 1 << 20), 1, 2)
    for path in folder_of(tmp_path, damaged).iterdir():
        content = path.read_bytes()
        for position in range(0, len(content), 37):
            changed = bytearray(content)
            changed[position] ^= 4
            path.write_bytes(changed)
            assert store_in(tmp_path).newest() == whole, (path.name, position)
        path.write_bytes(content)
    assert store_in(tmp_path).newest() == damaged


def test_what_a_killed_writer_left_is_incomplete_and_goes_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (whole,) = save_epochs(store_in(tmp_path), 1)
    left = tmp_path / CheckpointRef.new(2, 0).name
    left.mkdir()
    (left / "part-00000-00000.safetensors").write_bytes(b"half")
    (left / ".part-00000-00001.safetensors.aside").write_bytes(b"half")
    store = store_in(tmp_path)
    assert store.newest() == whole
    assert f"{left.name} in {tmp_path} has no manifest: incomplete, passed over" in caplog.text
    store.prune(2)
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]


def test_foreign_files_and_older_formats_are_passed_over_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    (whole,) = save_epochs(store, 1)
    (tmp_path / "epoch-0007.pt").write_bytes(b"of the format before")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / MANIFEST_NAME).write_text("{}")
    newer = CheckpointRef.new(9, 0)
    (tmp_path / newer.name).mkdir()
    (tmp_path / newer.name / MANIFEST_NAME).write_text(json.dumps({"format": 2}))
    assert store_in(tmp_path).newest() == whole
    assert f"epoch-0007.pt in {tmp_path} is no checkpoint of this format" in caplog.text
    assert "notes.txt" in caplog.text
    assert "its format is 2, expected 1" in caplog.text
    store.prune(1)
    assert {"epoch-0007.pt", "notes.txt", "folder"} < {path.name for path in tmp_path.iterdir()}


def rewrite_manifest(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change a manifest as somebody would who knows the format: with a digest that fits."""
    from tasks.training.checkpoints.manifest import _digest_of

    file = json.loads(path.read_text())
    change(file["content"])
    file["sha256"] = _digest_of(file["content"])
    path.write_text(json.dumps(file))


def use_bytes_twice(content: dict[str, object]) -> None:
    tensors = content["tensors"]
    for field in ("pieces", "shape", "dtype"):
        tensors[2][field] = tensors[1][field]  # type: ignore[index]


def put_a_tensor_into_another(content: dict[str, object]) -> None:
    content["tensors"][2]["keys"] = [*content["tensors"][1]["keys"], "x"]  # type: ignore[index]


def drop_the_plain_part(content: dict[str, object]) -> None:
    del content["tensors"][0]  # type: ignore[attr-defined]


def forged(place: str, value: object) -> Callable[[dict[str, object]], None]:
    """A change of the value at a dotted place."""

    def change(content: Any) -> None:
        *folders, last = (int(part) if part.isdigit() else part for part in place.split("."))
        for part in folders:
            content = content[part]
        content[last] = value

    change.__name__ = f"{place}={str(value)[:20]}"
    return change


@pytest.mark.parametrize(
    "change",
    [
        use_bytes_twice,
        put_a_tensor_into_another,
        drop_the_plain_part,
        forged("parts.0.name", "../../secret/part-00000-00000.safetensors"),
        forged("tensors.1.shape", [1 << 38]),  # a terabyte
        forged("tensors.1.pieces.0.offset", 1 << 40),
        forged("tensors.1.pieces.0.part", 1 << 40),
        forged("tensors.1.dtype", "OBJECT"),
        forged("tensors.1.keys", ["history", 99]),  # nowhere
        forged("tensors.1.keys", ["epoch", "x"]),  # inside a number
        forged("tensors.1.keys", ["a"] * 5000),
        forged("epoch", 900),
    ],
)
def test_a_forged_manifest_is_refused(
    change: Callable[[dict[str, object]], None], tmp_path: Path
) -> None:
    whole, harmful = save_epochs(store_in(tmp_path / "store", 1 << 20), 1, 2)
    rewrite_manifest(folder_of(tmp_path / "store", harmful) / MANIFEST_NAME, change)
    assert store_in(tmp_path / "store").newest() == whole
    with pytest.raises(ArtifactError, match="damaged"):
        store_in(tmp_path / "store").load(harmful)
